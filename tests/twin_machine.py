"""What the state machines of managers share: one schedule, carried out by kvyard and by the model.

A machine builds both managers, and says who arrives and how a request is admitted and goes on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests import helpers
from tests.twins import Twin, events_agree, pools_agree

if TYPE_CHECKING:
    import kvyard

    from tests.model.manager import Hits, KVCacheManager


class TwinMachine(RuleBasedStateMachine):
    """Two managers and the requests that both have."""

    ACTIONS: ClassVar[list[str]] = [
        *["admit"] * 5,
        *["step"] * 8,
        *["schedule"] * 6,
        *["land", "begin_step", "unpin", "reject_drafts", "skip"] * 2,
        *["finish", "preempt", "give_back", "replace_last_token", "pin", "occupy"],
        *["evict", "reset", "ask", "take_events"],
    ]
    """What a schedule consists of, by weight: a method each, which does nothing where it cannot."""

    ours: kvyard.KVCacheManager
    theirs: KVCacheManager
    longest: int
    """Tokens of a request, at most."""
    budget: int
    """New tokens of a step, at most."""
    most_drafts = 3
    """Drafts of a step, at most."""
    foreign = False
    """Whether requests are shown as vLLM's."""

    def __init__(self) -> None:
        super().__init__()
        self.twins: list[Twin] = []
        self.leases: list[tuple[kvyard.BlockLease, Hits]] = []
        self.pins: list[int] = []

    # -- choosing

    # Chosen by weight, and by one rule: Hypothesis would leave single rules out of whole runs.
    @rule(data=st.data())
    def act(self, data: st.DataObject) -> None:
        action = data.draw(st.sampled_from(self.ACTIONS), label="action")
        is_idle = all(twin.state != "running" for twin in self.twins)
        needs_running = action in ("step", "schedule", "preempt", "finish", "reject_drafts")
        getattr(self, "admit" if is_idle and needs_running else action)(data)

    def some(self, data: st.DataObject, *states: str) -> Twin | None:
        found = [twin for twin in self.twins if twin.state in states]
        return data.draw(st.sampled_from(found), label="request") if found else None

    def any_name(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from([*(twin.name for twin in self.twins), "unknown"]))

    # -- requests

    def arrive(self, data: st.DataObject) -> None:
        """A new request."""
        raise NotImplementedError

    def someone_waiting(self, data: st.DataObject) -> Twin | None:
        """Whom to admit: often somebody new."""
        nobody_waits = all(twin.state != "waiting" for twin in self.twins)
        if len(self.twins) < 6 and (nobody_waits or data.draw(st.booleans(), label="new?")):
            self.arrive(data)
        return self.some(data, "waiting")

    def look_up(
        self, data: st.DataObject, twin: Twin
    ) -> tuple[tuple[kvyard.KVCacheBlocks, Hits], int]:
        """What both find, which is the same, and its length in tokens."""
        raise NotImplementedError

    def num_encoder_tokens(self, data: st.DataObject) -> int:
        """Of a request that is admitted."""
        return 0

    def admit(self, data: st.DataObject) -> None:
        twin = self.someone_waiting(data)
        if twin is None:
            return
        hits, num_hit = self.look_up(data, twin)
        rest = min(twin.theirs.num_tokens, self.longest) - num_hit
        loads = rest > 1 and data.draw(st.integers(0, 2), label="loads?") == 0
        external = data.draw(st.integers(1, rest), label="external") if loads else 0
        delayed = loads and (external == rest or data.draw(st.booleans(), label="delayed"))
        most = min(rest - external, self.budget)
        # Often all that is left: what drafts do shows only behind the prompt.
        chunk = st.one_of(st.just(most), st.integers(1, max(1, most)))
        new = 0 if delayed else data.draw(chunk, label="new")
        admitted = self.allocate(
            data,
            twin,
            hits,
            num_new_tokens=new,
            num_new_computed_tokens=num_hit,
            num_lookahead_tokens=0 if delayed else data.draw(st.sampled_from([0, 0, 2, 5])),
            num_external_computed_tokens=external,
            delay_cache_blocks=delayed,
            num_encoder_tokens=self.num_encoder_tokens(data),
            full_sequence_must_fit=data.draw(st.booleans(), label="must fit"),
            has_scheduled_reqs=data.draw(st.booleans(), label="scheduled"),
        )
        if admitted:
            twin.state = "loading" if delayed else "running"
            twin.set(num_computed_tokens=num_hit + external + new)
            if not delayed:
                twin.set(status="RUNNING")

    def reserved(self, data: st.DataObject, twin: Twin, arguments: dict[str, Any]) -> int:
        """Blocks to reserve: often exactly as many as the prediction leaves, or one more."""
        tight = ["all but", "one too many"]
        is_tight = arguments.pop("is_tight", False)
        choices = tight if is_tight else ["none"] * 5 + ["few", *tight]
        how = data.draw(st.sampled_from(choices), label="reserved")
        if how in ("none", "few"):
            return 0 if how == "none" else data.draw(st.integers(1, 4))
        headroom = self.theirs.headroom(twin.theirs, **arguments)
        return max(0, headroom + (how == "one too many"))

    def allocate(
        self,
        data: st.DataObject,
        twin: Twin,
        hits: tuple[kvyard.KVCacheBlocks | None, Hits | None] = (None, None),
        **arguments: Any,
    ) -> bool:
        """As `allocate_slots`, with some blocks reserved."""
        reserved = self.reserved(data, twin, {**arguments, "new_computed_blocks": hits[1]})
        arguments.pop("is_tight", None)
        return self.allocate_slots(twin, hits, reserved_blocks=reserved, **arguments)

    def allocate_slots(
        self,
        twin: Twin,
        hits: tuple[kvyard.KVCacheBlocks | None, Hits | None] = (None, None),
        **arguments: Any,
    ) -> bool:
        """Whether it fits; both give the same blocks."""
        ours = self.ours.allocate_slots(twin.shown, new_computed_blocks=hits[0], **arguments)
        theirs = self.theirs.allocate_slots(twin.theirs, new_computed_blocks=hits[1], **arguments)
        assert (None if ours is None else list(ours.get_block_ids())) == theirs
        return theirs is not None

    def advance(
        self,
        data: st.DataObject,
        twin: Twin,
        new: int,
        drafts: int,
        rejects_all: bool = False,
        **more: Any,
    ) -> bool:
        """A prefill chunk, or a decode step with drafts, some of which are accepted."""
        computed = twin.theirs.num_computed_tokens
        if not self.allocate(data, twin, num_new_tokens=new + drafts, **more):
            return False
        choices = [0, 0, *range(1, drafts + 1)]
        accepted = 0
        if drafts and not rejects_all:
            accepted = data.draw(st.sampled_from(choices), label="accepted")
        twin.set(num_computed_tokens=computed + new + accepted)
        if computed + new == twin.theirs.num_tokens:  # the step samples tokens
            sampled = min(accepted + 1, self.longest - twin.theirs.num_tokens)
            if sampled < accepted:
                twin.set(num_computed_tokens=computed + new + sampled)
            first = data.draw(st.integers(70_000, 70_002), label="sampled")
            twin.append(list(range(first, first + sampled)))
        return True

    def step(self, data: st.DataObject) -> None:
        twin = self.some(data, "running")
        if twin is None or twin.remaining < 1:
            return
        computed = twin.theirs.num_computed_tokens
        most = min(twin.remaining, self.budget)
        new = data.draw(st.one_of(st.just(most), st.integers(1, most)), label="new")
        room = min(self.longest - computed, self.budget) - new
        drafts = 0
        if new == twin.remaining and data.draw(st.booleans(), label="drafts?"):
            drafts = data.draw(st.integers(0, max(0, min(self.most_drafts, room))))
        in_flight = data.draw(st.sampled_from([0, 0, 0, 1, 4]), label="in flight")
        in_flight = min(in_flight, computed)
        by_argument = self.foreign or data.draw(st.booleans(), label="in flight by argument")
        twin.set(num_in_flight_tokens=0 if by_argument else in_flight)
        self.advance(
            data,
            twin,
            new,
            drafts,
            num_lookahead_tokens=data.draw(st.sampled_from([0, 0, 1, 3]), label="lookahead"),
            num_in_flight_tokens=in_flight if by_argument else 0,
        )

    def reject_drafts(self, data: st.DataObject) -> None:
        """All drafts of a step are rejected, and the next has none: the row is too long then."""
        twin = self.some(data, "running")
        if twin is None:
            return
        twin.set(num_in_flight_tokens=0)
        while twin.remaining > 1:
            if not self.advance(data, twin, min(twin.remaining, self.budget), 0):
                return
        room = min(self.longest - twin.theirs.num_tokens, self.budget) - 1
        drafts = min(self.most_drafts, room)
        if drafts > 0 and self.advance(data, twin, 1, drafts, rejects_all=True):
            self.advance(data, twin, 1, 0, is_tight=True)

    def schedule(self, data: st.DataObject) -> None:
        """Steps of the whole batch; who finds no blocks is preempted, the last first."""
        share = data.draw(st.sampled_from([1, 3, 8, 64, 64]), label="share")
        lookahead = data.draw(st.sampled_from([0, 0, 2]), label="lookahead")
        for _ in range(data.draw(st.integers(1, 8), label="steps")):
            self.begin_step(data)
            for twin in [twin for twin in self.twins if twin.state == "running"]:
                if twin.state == "running" and twin.remaining > 0:
                    self.step_of_batch(data, twin, share, lookahead)

    def step_of_batch(self, data: st.DataObject, twin: Twin, share: int, lookahead: int) -> None:
        twin.set(num_in_flight_tokens=0)
        new = min(twin.remaining, self.budget, share)
        while not self.advance(data, twin, new, 0, num_lookahead_tokens=lookahead):
            victim = [other for other in self.twins if other.state == "running"][-1]
            self.free(victim)
            self.preempted(victim)
            if victim is twin:
                return

    def free(self, twin: Twin, num_written_tokens: int | None = None) -> None:
        self.ours.free(twin.shown, num_written_tokens=num_written_tokens)
        self.theirs.free(twin.theirs, num_written_tokens)

    def replace_last_token(self, data: st.DataObject) -> None:
        """A streaming session drops what was sampled last, and goes on with new input."""
        twin = self.some(data, "running")
        if twin is None or twin.remaining != 1:
            return
        kept = twin.theirs.num_computed_tokens
        if kept < twin.theirs.num_prompt_tokens:
            return
        twin.ours.truncate(kept)
        twin.theirs.truncate(kept)
        assert twin.ours.block_hashes == twin.theirs.hashes
        twin.append([data.draw(st.integers(0, 3), label="token")])

    def preempt(self, data: st.DataObject) -> None:
        twin = self.some(data, "running")
        if twin is None:
            return
        if data.draw(st.integers(0, 2), label="deferred?"):
            lease = self.ours.pop_blocks_for_free(twin.shown)
            groups = self.theirs.pop_blocks_for_free(twin.theirs)
            # Not as a list, which would dissolve the lease.
            popped = [lease[at].block_id for at in range(len(lease))]
            assert popped == [i for row in groups for i in row]
            self.leases.append((lease, groups))
        else:
            self.free(twin)
        self.preempted(twin)

    def preempted(self, twin: Twin) -> None:
        """The request begins again."""
        self.forget(twin)
        twin.state = "waiting"
        twin.set(
            status="PREEMPTED",
            num_computed_tokens=0,
            num_in_flight_tokens=0,
            num_preemptions=twin.theirs.num_preemptions + 1,
        )

    def finish(self, data: st.DataObject) -> None:
        """The end of a request; perhaps its last step did not run, or only in part."""
        twin = self.some(data, "running", "loading", "waiting")
        if twin is None:
            return
        written = None
        if data.draw(st.integers(0, 2), label="withdrawn?") == 1:
            written = data.draw(st.integers(0, twin.theirs.num_computed_tokens), label="written")
        self.free(twin, written)
        self.forget(twin)
        self.twins.remove(twin)

    def forget(self, twin: Twin) -> None:
        """The request has no blocks any more."""

    def give_back(self, data: st.DataObject) -> None:
        if self.leases:
            index = data.draw(st.integers(0, len(self.leases) - 1))
            ways = ["free_popped", "free_popped", "reversed", "list"]
            self.return_lease(index, data.draw(st.sampled_from(ways), label="way"))

    def return_lease(self, index: int, way: str) -> None:
        lease, groups = self.leases.pop(index)
        if way == "free_popped":
            self.ours.free_popped(lease)
            self.theirs.free_popped(groups)
            return
        # vLLM's way: a flat list is taken in the order given
        backwards = reversed(lease) if way == "reversed" else list(lease)[::-1]
        self.ours.block_pool.free_blocks(backwards)
        self.theirs.pool.free_blocks([i for row in groups for i in row][::-1])

    # -- others who hold blocks, and the rest of the surface

    def pin(self, data: st.DataObject) -> None:
        pool = self.theirs.pool
        usable = [i for i, b in enumerate(pool.blocks) if b.ref_cnt or b.key is not None]
        if usable:
            block_id = data.draw(st.sampled_from(usable))
            self.ours.block_pool.touch([self.ours.block_pool.blocks[block_id]])
            pool.touch([block_id])
            self.pins.append(block_id)

    def unpin(self, data: st.DataObject | None = None) -> None:
        pool, ids = self.ours.block_pool, self.pins
        if data is not None:
            ids = data.draw(st.permutations(ids), label="order")
        pool.free_blocks(pool.blocks[block_id] for block_id in ids)
        self.theirs.pool.free_blocks(ids)
        self.pins = []

    def occupy(self, data: st.DataObject) -> None:
        count = len(self.theirs.pool.free) * data.draw(st.integers(0, 4)) // 4
        taken = self.theirs.pool.get_new_blocks(count)
        assert helpers.ids_of(self.ours.block_pool.get_new_blocks(count)) == taken
        self.pins += taken

    def evict(self, data: st.DataObject) -> None:
        last = self.theirs.pool.num_blocks - 1
        ids = data.draw(st.lists(st.integers(0, last), max_size=6))
        self.ours.evict_blocks(ids)
        self.theirs.pool.evict_blocks(ids)

    def reset(self, data: st.DataObject) -> None:
        assert self.ours.reset_prefix_cache() == self.theirs.pool.reset_prefix_cache()

    def take_events(self, data: st.DataObject | None = None) -> None:
        events_agree(self.ours.take_events(), self.theirs.take_events())

    def skip(self, data: st.DataObject) -> None:
        twin = self.some(data, "running")
        if twin is None:
            return
        computed = twin.theirs.num_computed_tokens
        prompt = None if data.draw(st.integers(0, 3)) == 1 else twin.theirs.num_prompt_tokens
        self.ours.remove_skipped_blocks(twin.name, computed, prompt)
        self.theirs.remove_skipped_blocks(twin.name, computed, prompt)

    def ask(self, data: st.DataObject) -> None:
        name, tokens = self.any_name(data), data.draw(st.integers(0, 40), label="tokens")
        common = self.ours.get_num_common_prefix_blocks(name)
        assert common == self.theirs.get_num_common_prefix_blocks(name)
        rows = self.theirs.get_block_ids(name)
        assert list(self.ours.get_block_ids(name)) == rows
        assert list(self.ours.get_blocks(name).get_block_ids()) == rows
        filled = self.ours.get_block_ids_for_computed_tokens(name, tokens)
        assert list(filled) == self.theirs.get_block_ids_for_computed_tokens(name, tokens)

    def begin_step(self, data: st.DataObject) -> None:
        self.ours.new_step_starts()
        self.theirs.new_step_starts()
        assert self.ours.take_new_block_ids() == self.theirs.take_new_block_ids()

    def compare(self) -> None:
        """Everything that both show is the same, and ours holds its invariants."""
        self.ours.validate()
        pools_agree(self.ours.block_pool, self.theirs.pool)
        for twin in self.twins:
            assert list(self.ours.get_block_ids(twin.name)) == self.theirs.get_block_ids(twin.name)

    @invariant()
    def same_state(self) -> None:
        if hasattr(self, "ours"):
            self.compare()

    def teardown(self) -> None:
        """P10, I15: when all is given back, all is free, and the cache can be reset."""
        if not hasattr(self, "ours"):
            return
        self.take_events()
        for twin in self.twins:
            self.free(twin)
        while self.leases:
            self.return_lease(0, "free_popped")
        self.unpin()
        self.compare()
        pool = self.theirs.pool
        assert len(pool.free) == pool.num_blocks - 1 - pool.num_withdrawn, "P10, I15"
        assert self.ours.reset_prefix_cache()
