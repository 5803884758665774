"""Block hashes, byte for byte: vLLM's vectors V1 to V93 and R1 to R8, and `pickle` as an oracle."""

from __future__ import annotations

import hashlib
import json
import pickle
from array import array
from pathlib import Path
from typing import Any

import kvyard
import kvyard.hashing
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import helpers
from tests.model import hashing as model

VECTORS: list[dict[str, Any]] = [
    json.loads(line)
    for line in (Path(__file__).parent / "golden" / "hash_vectors.jsonl").read_text().splitlines()
]
FUNCTIONS = ["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"]
PARENT = bytes(range(32))
VLLM = kvyard.Semantics.vllm_0_25_1()
CORRECTED = kvyard.Semantics.corrected()


def vectors(kind: str) -> pytest.MarkDecorator:
    """A parametrization over the vectors of one kind."""
    chosen = [vector for vector in VECTORS if vector["kind"] == kind]
    assert chosen
    return pytest.mark.parametrize("vector", chosen, ids=[vector["n"] for vector in chosen])


def test_no_vector_is_missing() -> None:
    names = [vector["n"] for vector in VECTORS]
    assert names == [f"V{i}" for i in range(1, 94)] + [f"R{i}" for i in range(1, 9)]


def root(function: kvyard.HashFunction) -> bytes:
    """The root hash of most vectors."""
    return function("0")


def extra_keys(vector: dict[str, Any]) -> tuple[object, ...] | None:
    """The vector's extra keys."""
    if "extra" not in vector:
        return None
    members: list[object] = []
    for kind, *values in vector["extra"]:
        if kind == "pair":
            members.append(tuple(values))
        else:
            members.append(bytes.fromhex(values[0]) if kind == "bytes" else values[0])
    return tuple(members)


@vectors("root")
def test_root(vector: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", vector["seed"])
    monkeypatch.setattr(kvyard.hashing, "NONE_HASH", b"")
    kvyard.init_none_hash(kvyard.get_hash_fn_by_name(vector["function"]))
    assert vector["hex"] == kvyard.hashing.NONE_HASH.hex()


@vectors("chain")
def test_chain(vector: dict[str, Any]) -> None:
    function = kvyard.get_hash_fn_by_name(vector["function"])
    parent = None
    for block in range(vector["block"] + 1):
        tokens = range(4 * block + 1, 4 * block + 5)
        parent = kvyard.hash_block_tokens(function, parent, tokens, None, root(function))
    assert parent is not None
    assert parent.hex() == vector["hex"]
    request = helpers.make_request("r", range(1, 13), algorithm=vector["function"])
    assert request.block_hashes[vector["block"]].hex() == vector["hex"]


@vectors("block")
def test_first_block(vector: dict[str, Any]) -> None:
    function = kvyard.get_hash_fn_by_name(vector["function"])
    tokens = vector.get("tokens") or range(*vector["range"])
    extra = extra_keys(vector)
    got = kvyard.hash_block_tokens(function, None, tokens, extra, root(function))
    assert got.hex() == vector["hex"]
    assert function((root(function), tuple(tokens), extra)) == got


@vectors("identity")
def test_identity_of_texts(vector: dict[str, Any]) -> None:
    first = "imgA"
    second = first if vector["same"] else "".join(["im", "gA"])
    assert (first is second) == vector["same"]
    function = kvyard.get_hash_fn_by_name(vector["function"])
    extra = ((first, 0), (second, 2))
    got = kvyard.hash_block_tokens(function, None, [1, 2, 3, 4], extra, root(function))
    assert got.hex() == vector["hex"]


@vectors("bytes")
def test_serialised_bytes(vector: dict[str, Any]) -> None:
    """The serialisation itself is not visible; its digest is, and so are Python's own bytes."""
    same = "imgA"
    other = "".join(["im", "gA"])
    block = (1, 2, 3, 4)
    numbers = (65536, 2147483647, 2147483648, 4294967296)
    values: dict[str, object] = {
        "V17": "0",
        "V18": "0",
        "V31": (model.HASH_FUNCTIONS["sha256"]("0"), block, None),
        "V32": (model.HASH_FUNCTIONS["sha256_cbor"]("0"), block, None),
        "V61": (b"", numbers, None),
        "V62": (7,),
        "V63": (7, 8),
        "V64": (),
        "V87": ((same, 0), (same, 2)),
        "V88": ((same, 0), (other, 2)),
    }
    value = values[vector["n"]]
    is_cbor = vector["what"].startswith("cbor")
    expected = bytes.fromhex(vector["hex"])
    assert (model.cbor(value) if is_cbor else pickle.dumps(value, 5)) == expected
    function = kvyard.get_hash_fn_by_name("sha256_cbor" if is_cbor else "sha256")
    if vector["n"] in ("V17", "V18", "V31", "V32", "V61"):
        assert function(value) == hashlib.sha256(expected).digest()
    elif vector["n"] in ("V62", "V63", "V64"):  # token tuples of one, two and no tokens
        triple: tuple[object, ...] = (PARENT, value, None)
        assert function(triple) == hashlib.sha256(pickle.dumps(triple, 5)).digest()
    else:
        triple = (PARENT, (1,), value)
        assert function(triple) == hashlib.sha256(pickle.dumps(triple, 5)).digest()


@vectors("key")
def test_group_key(vector: dict[str, Any]) -> None:
    pool = kvyard.BlockPool(4, True, 4)
    request = helpers.make_request("r", [1, 2, 3, 4])
    [block] = pool.get_new_blocks(1)
    pool.cache_full_blocks(request, [block], 0, 1, 4, vector["group"])
    assert block.block_hash is not None
    assert block.block_hash.hex() == vector["hex"]
    key = block.block_hash
    assert pool.cached_block_hash_to_block.get_one_block(key) is block


def test_external_hash() -> None:
    for algorithm, expected in (
        ("sha256", 10362225831949560093),
        ("xxhash_cbor", 1560721706249274670),
    ):
        kvyard.get_hash_fn_by_name(algorithm)
        pool = kvyard.BlockPool(4, True, 4, True)
        request = helpers.make_request("r", [1, 2, 3, 4], algorithm=algorithm)
        blocks = pool.get_new_blocks(1)
        pool.cache_full_blocks(request, blocks, 0, 1, 4, 0)
        [event] = pool.take_events()
        assert isinstance(event, kvyard.BlockStored)
        assert event.block_hashes == [expected]


def request_of_vector(name: str, algorithm: str) -> kvyard.Request:
    """The requests of R1 to R8."""
    tokens: list[int] = list(range(10 if name in ("R1", "R2") else 12))
    arguments: dict[str, Any] = {}
    if name == "R3":
        arguments["cache_salt"] = "S"
    if name in ("R4", "R8"):
        arguments["lora_request"] = helpers.Lora("L", 1)
    if name in ("R5", "R6"):
        tokens = [1, 9, 9, 9, 9, 9, 2, 3, 8, 8, 4, 5]
        arguments["mm_features"] = [("imgA", 1, 5), ("imgB", 8, 2)]
    if name == "R8":
        arguments.update(mm_features=[("imgA", 2, 4)], cache_salt="S")
    if name == "R7":
        floats = memoryview(array("f", range(16))).cast("B").cast("f", (8, 2))
        function = kvyard.get_hash_fn_by_name(algorithm)
        hasher = kvyard.BlockHasher(function, root(function), 4, VLLM)
        return kvyard.Request("r", None, prompt_embeds=floats, block_hasher=hasher)
    return helpers.make_request("r", tokens, semantics=VLLM, algorithm=algorithm, **arguments)


@vectors("request")
def test_request(vector: dict[str, Any]) -> None:
    request = request_of_vector(vector["n"], vector["function"])
    if vector["n"] in ("R1", "R2"):
        assert [h.hex() for h in request.block_hashes] == vector["hashes"][:2]
        request.append_output_token_ids([10, 11])
    assert [h.hex() for h in request.block_hashes] == vector["hashes"]


# -- pickle and CBOR as oracles

texts = st.text(st.characters(codec="utf-8"), max_size=300)
members = st.one_of(
    texts,
    st.binary(max_size=300),
    st.tuples(texts, st.integers(-(2**31), 2**31 - 1)),
)
triples = st.tuples(
    st.binary(min_size=31, max_size=31).map(lambda start: start + b"\1"),
    st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 2**17), max_size=300).map(tuple),
    st.none() | st.lists(members, min_size=1, max_size=5).map(tuple),
)


@given(value=triples, algorithm=st.sampled_from(FUNCTIONS))
def test_function_equals_python(value: tuple[object, ...], algorithm: str) -> None:
    function = kvyard.get_hash_fn_by_name(algorithm)
    assert function(value) == model.HASH_FUNCTIONS[algorithm](value)


@pytest.mark.parametrize("algorithm", FUNCTIONS)
@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 31, 33, 300])
def test_parents_of_any_length_are_exact_or_refused(algorithm: str, size: int) -> None:
    value = (bytes([7]) * size, (1, 2), None)
    try:
        got = kvyard.get_hash_fn_by_name(algorithm)(value)
    except kvyard.InvalidArgumentError:
        return
    assert got == model.HASH_FUNCTIONS[algorithm](value)


@pytest.mark.parametrize("algorithm", FUNCTIONS)
def test_identity_of_bytes(algorithm: str) -> None:
    """A bytes object that is used twice is written as a reference, also where it is the parent."""
    function, other = kvyard.get_hash_fn_by_name(algorithm), bytes(bytearray(PARENT))
    assert other is not PARENT
    for extra in ((PARENT,), (other,), (other, other), (other, PARENT), (PARENT, "a", PARENT)):
        value = (PARENT, (1, 2), extra)
        assert function(value) == model.HASH_FUNCTIONS[algorithm](value)


@pytest.mark.parametrize("algorithm", FUNCTIONS)
def test_a_random_root_has_32_bytes_for_all_functions(algorithm: str) -> None:
    function, hashes = kvyard.get_hash_fn_by_name(algorithm), []
    parent = PARENT
    for block in range(3):
        tokens = tuple(range(4 * block, 4 * block + 4))
        parent = model.HASH_FUNCTIONS[algorithm]((parent, tokens, None))
        hashes.append(parent)
    hasher = kvyard.BlockHasher(function, PARENT, 4)
    assert hasher.none_hash == PARENT
    assert kvyard.Request("r", list(range(12)), block_hasher=hasher).block_hashes == hashes


@pytest.mark.parametrize("count", [12_000, 13_105, 13_106, 21_843, 21_844, 40_000])
def test_pickle_frames(count: int) -> None:
    """A frame ends where its payload has reached 64 KiB, before the next object."""
    value = (PARENT, tuple(range(70_000, 70_000 + count)), ("salt",))
    expected = hashlib.sha256(pickle.dumps(value, 5)).digest()
    assert kvyard.get_hash_fn_by_name("sha256")(value) == expected


@given(text=texts, algorithm=st.sampled_from(FUNCTIONS))
def test_root_equals_python(text: str, algorithm: str) -> None:
    function = kvyard.get_hash_fn_by_name(algorithm)
    assert function(text) == model.HASH_FUNCTIONS[algorithm](text)


@pytest.mark.parametrize("algorithm", FUNCTIONS)
def test_tagged_keys(algorithm: str) -> None:
    """Under `hash_domains="tagged"` each member says what it is; a tag text is one object."""
    lora, mm, salt = "lora", "mm", "cache_salt"
    request = helpers.make_request(
        "r",
        range(8),
        algorithm=algorithm,
        lora_request=helpers.Lora("L", 1, "/path"),
        mm_features=[("imgA", 1, 1), ("imgB", 3, 2)],
        cache_salt="S",
    )
    function = model.HASH_FUNCTIONS[algorithm]
    # Each text of the request is one object in all of its blocks; "L" and "S" are two objects.
    first = ((lora, "L", "/path"), (mm, "imgA", 1), (mm, "imgB", 3), (salt, "S"))
    second = ((lora, "L", "/path"), (mm, "imgB", -1))
    expected = [function((function("0"), (0, 1, 2, 3), first))]
    expected.append(function((expected[0], (4, 5, 6, 7), second)))
    assert request.block_hashes == expected


@pytest.mark.parametrize("algorithm", FUNCTIONS)
@pytest.mark.parametrize("mask", [None, [True, True, False, True, True, False, True, True]])
def test_tagged_embeddings(algorithm: str, mask: list[bool] | None) -> None:
    tag = "prompt_embeds"
    floats = memoryview(array("f", range(16))).cast("B").cast("f", (8, 2))
    data = floats.tobytes()
    function = kvyard.get_hash_fn_by_name(algorithm)
    hasher = kvyard.BlockHasher(function, root(function), 4, CORRECTED)
    request = kvyard.Request(
        "r",
        list(range(8)),
        prompt_embeds=floats,
        prompt_embeds_mask=mask,
        block_hasher=hasher,
    )
    parent = root(function)
    for block in range(2):
        digest = hashlib.sha256(data[32 * block : 32 * block + 32]).digest()
        member: tuple[object, ...] = (tag, digest)
        if mask is not None:
            member = (tag, digest, bytes(mask[4 * block : 4 * block + 4]))
        tokens = tuple(range(4 * block, 4 * block + 4))
        parent = model.HASH_FUNCTIONS[algorithm]((parent, tokens, (member,)))
        assert request.block_hashes[block] == parent


# -- the Python layer


def test_without_a_seed_the_root_is_random(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    monkeypatch.setattr(kvyard.hashing, "NONE_HASH", b"")
    roots = set()
    for name in FUNCTIONS:
        caplog.clear()
        kvyard.init_none_hash(kvyard.get_hash_fn_by_name(name))
        roots.add(kvyard.hashing.NONE_HASH)
        assert len(kvyard.hashing.NONE_HASH) == 32
        assert ("PYTHONHASHSEED" in caplog.text) == name.endswith("_cbor")
    assert len(roots) == len(FUNCTIONS)


def test_hasher_needs_a_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvyard.hashing, "NONE_HASH", b"")
    function = kvyard.get_hash_fn_by_name("sha256")
    with pytest.raises(kvyard.ConfigError, match="init_none_hash"):
        kvyard.get_request_block_hasher(4, function)
    with pytest.raises(kvyard.ConfigError, match="init_none_hash"):
        kvyard.hash_block_tokens(function, None, [1])


def test_hasher_takes_the_root_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    monkeypatch.setattr(kvyard.hashing, "NONE_HASH", b"")
    function = kvyard.get_hash_fn_by_name("sha256")
    kvyard.init_none_hash(function)
    hasher = kvyard.get_request_block_hasher(4, function)
    assert hasher.none_hash == function("0")
    assert hasher.semantics == CORRECTED
    assert kvyard.get_request_block_hasher(4, function, VLLM).semantics == VLLM
    request = kvyard.Request("r", [0, 1, 2, 3], block_hasher=hasher)
    assert kvyard.hash_block_tokens(function, None, [0, 1, 2, 3]) == request.block_hashes[0]


def test_unknown_function() -> None:
    with pytest.raises(kvyard.ConfigError, match="md5"):
        kvyard.get_hash_fn_by_name("md5")


def test_function_is_a_value() -> None:
    first, second = kvyard.HashFunction("sha256"), kvyard.HashFunction("sha256")
    assert first == second
    assert first != kvyard.HashFunction("xxhash")
    assert {first: 1}[second] == 1
    assert [kvyard.HashFunction(name).width for name in FUNCTIONS] == [32, 32, 16, 16]


def test_hasher_gives_only_what_is_new_and_appends_nothing() -> None:
    hasher = helpers.make_hasher(4)
    request = kvyard.Request("r", list(range(10)))
    assert request.block_hashes == []
    hashes = hasher(request)
    assert len(hashes) == 2
    assert request.block_hashes == []
    request.block_hashes = hashes
    request.append_output_token_ids([10, 11])
    assert hasher(request) == helpers.make_request("s", range(12)).block_hashes[2:]


@pytest.mark.parametrize("typecode", ["I", "H", "i", "q"])
def test_tokens_from_buffers(typecode: str) -> None:
    tokens = [5, 60_000, 7, 8, 9]
    expected = helpers.make_request("r", tokens).block_hashes if typecode == "I" else None
    if typecode == "H":
        tokens = [t % 60_000 for t in tokens]
    request = kvyard.Request("r", array(typecode, [t % 32_000 for t in tokens]))
    assert request.all_token_ids == [t % 32_000 for t in tokens]
    if expected is not None:
        buffer = memoryview(array("I", tokens))
        request = kvyard.Request("r", buffer, block_hasher=helpers.make_hasher())
        assert request.block_hashes == expected


def test_truncation_drops_hashes() -> None:
    request = helpers.make_request("r", range(10))
    request.append_output_token_ids([10, 11, 12])
    request.truncate(11)
    assert (request.num_tokens, len(request.block_hashes)) == (11, 2)
    request.append_output_token_ids(99)
    assert request.block_hashes == helpers.make_request("s", [*range(11), 99]).block_hashes
