"""The place in the data is one number."""

from trimtab.trainer.order import Order, sampling_seed, stream


def test_every_pass_sees_every_prompt_once_in_another_order():
    order = Order(10, seed=3)
    passes = [[order[10 * p + i] for i in range(10)] for p in range(3)]
    assert all(sorted(found) == list(range(10)) for found in passes)
    assert passes[0] != passes[1] != passes[2]


def test_it_depends_on_seed_and_position_alone():
    first = Order(10, seed=3)
    read = [first[i] for i in range(40)]
    again = Order(10, seed=3)
    assert [again[i] for i in (35, 3, 17)] == [read[i] for i in (35, 3, 17)]
    assert [Order(10, seed=4)[i] for i in range(40)] != read


def test_streams_of_different_purposes_differ():
    assert sampling_seed(0, "sample", 1, 0, 0) != sampling_seed(0, "evaluate", 1, 0, 0)
    assert sampling_seed(0, "sample", 1, 0, 0) == sampling_seed(0, "sample", 1, 0, 0)
    assert sampling_seed(0, "sample", 1, 0, 0) < 2**63
    assert stream(0, "minibatch", 5).random() == stream(0, "minibatch", 5).random()
