"""The lines that each worker gets, and those of a worker that ends."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from support.batches import filled

from mlxrunner.batch.options import ORDERS, Order
from mlxrunner.batch.plan import costs_of
from mlxrunner.batch.store import Store
from mlxrunner.cluster.dealing import MOST_ENDS, Dealer


@pytest.fixture
def store() -> Iterator[Store]:
    """Four groups of ten lines, each group with a prefix of its own."""
    with filled([[group] * 20 + [number] for group in range(4) for number in range(10)]) as made:
        yield made


def dealer_of(store: Store, parts: int = 1, order: Order = "prefix") -> Dealer:
    """Deal the lines of a store in this order, with answers of 5 tokens."""
    indexes, costs = costs_of(store.pending(order), {}, answer=5)
    return Dealer(store.line, indexes, costs, parts)


def taken(dealer: Dealer, worker: str, count: int = 1000) -> list[int]:
    """Take lines until the worker gets no more, and return their indexes."""
    found: list[int] = []
    while len(found) < count and (line := dealer.take(worker)) is not None:
        found.append(line.index)
    return found


def answer(dealer: Dealer, store: Store, worker: str, index: int) -> bool:
    """Answer a line; False if it was answered before."""
    if dealer.answered(worker, index) is None:
        return False
    store.record(index, b"{}")
    return True


@pytest.mark.parametrize("count", [1, 2, 3, 7, 40, 100])
def test_stretches_cover_the_run_order_once(store: Store, count: int) -> None:
    for order in ORDERS:
        dealer = dealer_of(store, count, order)
        assert sorted(taken(dealer, "a")) == list(range(40))
        assert dealer.is_done


def test_a_worker_goes_on_where_it_was(store: Store) -> None:
    """Two workers at a time keep to their own stretches, and so to their own prefixes."""
    dealer = dealer_of(store, 2)
    found: dict[str, list[int]] = {"a": [], "b": []}
    for _ in range(20):
        for worker in found:
            found[worker] += taken(dealer, worker, 1)
    assert found == {"a": list(range(20)), "b": list(range(20, 40))}


def test_an_idle_worker_takes_a_part_that_begins_with_another_prefix() -> None:
    """The cut is where two long prefixes meet, not in the middle of one."""
    prompts = [[group] * 200 + [number] for group in range(5) for number in range(10)]
    with filled(prompts) as store:
        dealer = dealer_of(store)
        assert taken(dealer, "a", 10) == list(range(10))
        begun = [taken(dealer, worker, 1) for worker in "bcd"]
        assert sorted(begun) == [[20], [30], [40]]
        for index in range(10):
            answer(dealer, store, "a", index)
        assert taken(dealer, "a", 10)[:5] == list(range(10, 15))


def test_the_last_lines_are_shared_out(store: Store) -> None:
    """Others take what a slow worker has not begun, as long as that pays."""
    dealer = dealer_of(store)
    taken(dealer, "slow", 1)
    answered = 0
    while found := taken(dealer, "fast", 1):
        answered += answer(dealer, store, "fast", found[0])
    assert answered >= 34


def test_a_worker_has_no_more_lines_than_its_share_of_what_is_left(store: Store) -> None:
    """The rest of its stretch is for others, or for later, when it has answered."""
    dealer = dealer_of(store, 2)
    first, other = taken(dealer, "a", 1), taken(dealer, "b", 1)
    for _ in range(15):
        answer(dealer, store, "b", other[0])
        other = taken(dealer, "b", 1)
    assert len(first + taken(dealer, "a")) <= 5, "b is much faster"
    assert not dealer.is_done


def test_lines_of_an_ended_worker_run_again_alone(store: Store) -> None:
    dealer = dealer_of(store)
    lost = taken(dealer, "a", 3)
    other = taken(dealer, "b", 1)
    assert dealer.lost("a") == []
    assert dealer.take("b") is None, "it ends what it has first"
    answer(dealer, store, "b", other[0])
    for index in lost:
        assert taken(dealer, "b") == [index], "one at a time"
        answer(dealer, store, "b", index)
    rest = taken(dealer, "b")
    assert sorted([*lost, *other, *rest]) == list(range(40))


def test_others_go_on_while_one_runs_what_was_lost(store: Store) -> None:
    dealer = dealer_of(store, 4)
    taken(dealer, "a", 3)
    dealer.lost("a")
    assert len(taken(dealer, "b")) == 1
    assert len(taken(dealer, "c", 5)) == 5


def test_a_line_that_ends_three_workers_is_given_up_and_the_others_are_not(store: Store) -> None:
    dealer, ends, guilty = dealer_of(store), 0, []
    answered = set[int]()
    for number in range(1000):
        worker = f"w{number}"
        while found := taken(dealer, worker, 8):
            if 17 in found:
                ends += 1
                guilty += [line.index for line in dealer.lost(worker)]
                break
            answered |= {index for index in found if answer(dealer, store, worker, index)}
        if dealer.is_done and not dealer.running:
            break
    assert (guilty, ends) == ([17], MOST_ENDS)
    assert answered == set(range(40)) - {17}


def test_a_worker_that_left_for_another_reason_blames_no_line(store: Store) -> None:
    dealer = dealer_of(store, 40)
    for _ in range(2 * MOST_ENDS):
        assert taken(dealer, "a", 1) == [0]
        assert dealer.lost("a", is_to_blame=False) == []


def test_an_answer_that_comes_twice_counts_once(store: Store) -> None:
    """A worker that was silent comes back with its answer, before or after the other one."""
    dealer = dealer_of(store)
    assert taken(dealer, "a", 2) == [0, 1]
    dealer.lost("a")
    assert taken(dealer, "b", 1) == [0]
    assert dealer.answered("a", 0) is not None
    assert dealer.answered("b", 0) is None
    assert dealer.answered("a", 1) is not None
    assert dealer.answered("a", 1) is None
    assert taken(dealer, "b") == list(range(2, 40))


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_each_line_is_answered_once(store: Store, seed: int) -> None:
    """Workers come, end, fall silent and answer late, at random."""
    chosen = random.Random(seed)
    dealer = dealer_of(store, chosen.randint(1, 9), chosen.choice(ORDERS))
    answered: list[int] = []
    has: dict[str, list[int]] = {f"w{number}": [] for number in range(4)}
    late: list[tuple[str, int]] = []
    while dealer.running or not dealer.is_done:
        worker = chosen.choice(list(has))
        match chosen.randrange(20):
            case 0:
                is_late = chosen.random() < 0.5
                late += [(worker, index) for index in has.pop(worker) if is_late]
                dealer.lost(worker, is_to_blame=False)
                has[f"w{chosen.random()}"] = []
            case 1 if late:
                name, index = late.pop()
                answered += [index] if answer(dealer, store, name, index) else []
            case number if number % 2 and has[worker]:
                index = has[worker].pop(chosen.randrange(len(has[worker])))
                answered += [index] if answer(dealer, store, worker, index) else []
            case _ if len(has[worker]) < 5:
                has[worker] += taken(dealer, worker, 1)
    assert sorted(answered) == list(range(40))
