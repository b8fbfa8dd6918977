"""Descriptions of the ranks of a model whose MLPs are divided, as tensor parallelism would make them."""

from dataclasses import replace


def share(description, rank):
    """The description of one of two ranks that each have half of the MLPs' inner columns."""
    config = description.config
    half = replace(description, config=replace(config, intermediate_size=config.intermediate_size // 2))
    places = dict(half.weight_map)
    for name, place in places.items():
        whole = description.weight_map[name].shape
        if place.shape != whole:
            axes = zip(place.shape, whole, strict=True)
            own = [range(size) if size == full else range(rank * size, (rank + 1) * size) for size, full in axes]
            places[name] = replace(place, shape=whole, ranges=tuple(own))
    vars(half)["weight_map"] = places
    return half
