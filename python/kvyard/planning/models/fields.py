"""Reading a model's `config.json`: fields by name, with errors that say what is missing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvyard.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping


class ConfigFields:
    """The fields of a language model's configuration, as Hugging Face names them.

    A multimodal model keeps them in `text_config`; what is not there is looked up outside.

    Attributes:
        model_type: The language model's type.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Find the language model's part.

        Args:
            config: The parsed `config.json`.

        Raises:
            ConfigError: A value has the wrong type.
        """
        text_config = config.get("text_config")
        if text_config is not None and not isinstance(text_config, dict):
            raise ConfigError("config: text_config is not an object")
        self._levels = [level for level in (text_config, config) if level is not None]
        types = [level.get("model_type") for level in self._levels]
        self.model_type = next((str(name) for name in types if name), "")
        architectures = config.get("architectures") or []
        self.architecture = str(architectures[0]) if architectures else ""
        self._defaults: Mapping[str, Any] = {}

    def set_defaults(self, defaults: Mapping[str, Any]) -> None:
        """Give values for fields that published configurations leave out."""
        self._defaults = defaults

    def get(self, *names: str) -> Any:
        """The first of these fields that is there and not null, or None."""
        for level in (*self._levels, self._defaults):
            for name in names:
                if name in level:
                    if level[name] is None:
                        continue
                    return level[name]
        return None

    def is_null(self, name: str) -> bool:
        """Whether the configuration sets a field to null, which overrules a default."""
        return any(name in level and level[name] is None for level in self._levels)

    def require(self, *names: str) -> None:
        """Check that fields are there; "a|b" is there if one of them is.

        Raises:
            ConfigError: Some are not; the message lists all of them.
        """
        missing = [name for name in names if self.get(*name.split("|")) is None]
        if missing:
            listed = ", ".join(name.replace("|", " or ") for name in missing)
            raise ConfigError(f"config: model type {self.model_type!r} needs {listed}")

    def integer(self, *names: str) -> int:
        """The first of these fields that is there.

        Raises:
            ConfigError: None is there, or it is no positive whole number.
        """
        self.require("|".join(names))
        value = self.get(*names)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise ConfigError(f"config: {names[0]} is {value!r}, not a positive whole number")
        return value

    def texts(self, name: str) -> list[str] | None:
        """A list of texts, or None where it is absent.

        Raises:
            ConfigError: It is something else.
        """
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ConfigError(f"config: {name} is not a list of texts")
        return value
