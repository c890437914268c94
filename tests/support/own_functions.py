"""Functions as operators write them, good and bad, for the settings preprocess and combine."""

import threading

import numpy as np

TRIED = 16  # px: the tiny set's input, which the trial has; the fakes' images have 2

in_place_of_vote: list = []  # a test puts a function here that is to be called instead
calls: list[tuple[str, int]] = []  # stage and images of each
hold = threading.Event()


def identity(images):
    calls.append(("preprocess", len(images)))
    return images


def with_negatives(images):
    return np.concatenate([images, 255 - images])


def many_views(images):
    return np.concatenate([images] * 7)


def too_many_views(images):
    return np.concatenate([images] * 9)


def views_as_it_likes(images):
    return np.concatenate([images] * (1 if len(images) == 1 else 2))


def writes(images):
    images[:] = 0
    return images


def fewer(images):
    return images[1:]


def smaller(images):
    return images[:, ::2, ::2]


def as_float(images):
    return images / np.float32(255)


def nothing(images):
    return None


def leaves(images):
    raise SystemExit(3)


def raises_when_served(images):
    if images.shape[1] != TRIED:
        raise RuntimeError("the operator's own words")
    return images


def leaves_when_served(images):
    return images if images.shape[1] == TRIED else leaves(images)


def fewer_when_served(images):
    return images if images.shape[1] == TRIED else fewer(images)


def hangs_when_served(images):
    if images.shape[1] != TRIED:
        hold.wait(60)
    return images


def raises_on_many(images):
    if len(images) > 3:
        raise ValueError("too many")
    return images


async def asynchronous(images):
    return images


def vote(members, weights):
    """Take the weights' majority; None of the members may be missing from them."""
    calls.append(("combine", len(next(iter(members.values())))))
    assert members.keys() == weights.keys()
    if in_place_of_vote:
        return in_place_of_vote[-1](members)
    votes = np.zeros_like(next(iter(members.values())))
    for name, rows in members.items():
        votes[np.arange(len(rows)), rows.argmax(axis=1)] += np.float32(weights[name])
    return votes


def vote_on_few(members, weights):
    """Pass the trial, which has up to three images, and fail on forms of more."""
    if len(next(iter(members.values()))) > 3:
        raise RuntimeError("the operator's own words")
    return vote(members, weights)


def wants_both(members, weights):
    return (members["sure"] + members["unsure"]) / 2


def one_row(members, weights):
    return np.array([1, 0, 0], np.float32)


def not_a_number(members, weights):
    return np.full_like(next(iter(members.values())), np.nan)


def of_two(members, weights):
    return np.full_like(next(iter(members.values())), 2 / 3)


def negative(members, weights):
    return np.tile(np.array([2, -1, 0], np.float32), (len(next(iter(members.values()))), 1))


def double(members, weights):
    return vote(members, weights).astype(np.float64)


def three_arguments(members, weights, more):
    return next(iter(members.values()))


class Object:
    def __call__(self, images):
        return images[..., ::-1]


an_object = Object()


def highest(members, weights):
    """Take each class's highest score: a combination of scores that are each by itself."""
    return np.max(np.stack(list(members.values())), axis=0)
