"""Who keeps whom waiting, told from what ranks say of themselves."""

import pytest

from shardwise.run.processes.watch import Heartbeat, PeerStatus, cause_of_waiting, ranks_behind

QUIET = 15.0


def beat(rank, *, node="0", doing="at step 12", **wait):
    return Heartbeat(rank, 7, 1000 + rank, node, f"host{node}", doing, **wait)


def waits_in(rank, group, ranks, started, **more):
    return beat(rank, waits=30.0, call="all_reduce of layer 3", group=group, ranks=ranks, collectives=started, **more)


def cause(own, *others, silent=None, **options):
    heard = {other.rank: PeerStatus(other, (silent or {}).get(other.rank, 0.0)) for other in others}
    return cause_of_waiting(own, heard, quiet=QUIET, **options)


def test_a_beat_travels_as_text():
    for sent in (beat(3), waits_in(1, "5", (0, 1), {"5": 3}, missing=(0,))):
        assert Heartbeat.from_text(sent.to_text().encode()) == sent


def test_who_has_started_fewer_collectives_is_missing():
    own = waits_in(0, "5", (0, 1, 2), {"5": 10, "0": 1})
    found = cause(own, beat(1, collectives={"5": 9, "0": 2}), waits_in(2, "5", (0, 1, 2), {"5": 10, "0": 1}))
    assert found.ranks == (1,)
    assert found.text == "waiting for rank 1 for 30 s, in all_reduce of layer 3, at step 12"
    assert (found.silent, found.stuck) == (0, 0)


def test_what_a_rank_knows_itself_comes_first():
    found = cause(waits_in(0, "", (0, 1, 2), {}, missing=(2,)), beat(1), beat(2, doing="reading the text"))
    assert found.ranks == (2,)
    assert found.text.endswith("at step 12; rank 2 is reading the text")


def test_silence_is_told_from_work():
    own = waits_in(0, "5", (0, 1, 2), {"5": 10})
    # Stopped after it came to the same collective: the others' numbers do not tell.
    found = cause(own, beat(1, collectives={"5": 10}), beat(2, collectives={"5": 10}), silent={1: 28.0})
    assert found.ranks == (1,)
    assert found.text.startswith(
        "waiting for rank 1 for 30 s, in all_reduce of layer 3, at step 12; no sign of life for 28"
    )
    assert found.silent == 28
    found = cause(own, beat(1, collectives={"5": 9}), beat(2, collectives={"5": 9}), silent={1: 28.0})
    assert found.ranks == (1, 2)
    assert found.text.startswith("waiting for ranks 1 and 2 for 30 s")


def test_a_chain_ends_at_the_rank_that_waits_for_nobody():
    # 0 waits for 1 in the tensor-parallel group, 1 for 3 in the data-parallel one, and 3 is late.
    own = waits_in(0, "tp", (0, 1), {"tp": 5})
    found = cause(own, waits_in(1, "dp", (1, 3), {"tp": 4, "dp": 2}), beat(3, collectives={"dp": 1}), beat(2))
    assert found.ranks == (3,)
    # One that has waited for a moment is at work.
    short = beat(1, waits=0.1, call="receive", group="dp", ranks=(1, 3), collectives={"tp": 4, "dp": 2})
    assert cause(own, short, beat(3, collectives={"dp": 1})).ranks == (1,)


def test_ranks_that_wait_for_each_other():
    own = waits_in(0, "a", (0, 1), {"a": 1, "b": 0})
    found = cause(own, waits_in(1, "b", (0, 1), {"a": 0, "b": 1}))
    assert found.ranks == (1,)
    assert found.stuck == 30
    assert found.text.endswith("; rank 1 waits too, in all_reduce of layer 3, at step 12")


def test_without_the_store_it_is_the_other_hosts():
    own = waits_in(2, "5", (0, 1, 2, 3), {"5": 10}, node="1")
    others = [beat(0, collectives={"5": 9}), beat(1, collectives={"5": 9}), beat(3, node="1", collectives={"5": 3})]
    found = cause(own, *others, unheard=29.0)
    assert found.ranks == (0, 1)
    assert found.text == (
        "waiting for ranks 0 on host0 and 1 on host0 for 30 s, in all_reduce of layer 3, at step 12; the launcher's "
        "store has not answered for 29 s"
    )
    assert found.silent == 29


def test_many_ranks_are_not_all_named():
    own = waits_in(0, "", tuple(range(100)), {}, missing=tuple(range(1, 100)))
    assert "waiting for ranks 1, 2, 3, 4, 5, 6, 7, 8 and 91 more for 30 s" in cause(own).text


@pytest.mark.parametrize(("fresh", "expected"), [(True, (1,)), (False, ())])
def test_ranks_that_are_behind_in_a_stream(fresh, expected):
    own = beat(0, collectives={"tp": 10, "dp": 3})
    heard = {
        1: PeerStatus(beat(1, collectives={"tp": 9, "other": 1}), 0.0, fresh),
        2: PeerStatus(beat(2, collectives={"dp": 3, "tp": 11}), 1.0),
    }
    assert ranks_behind(own, heard, quiet=QUIET) == expected
    heard[2] = PeerStatus(heard[2].beat, 16.0)
    assert ranks_behind(own, heard, quiet=QUIET) == (*expected, 2)
