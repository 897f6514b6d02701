"""Spherical k-means: centroids of directions, for router rows that start where the layer's inputs are."""

import torch
from torch import Tensor

ITERATIONS = 20


def spherical_kmeans(points: Tensor, clusters: int, generator: torch.Generator) -> Tensor:
    """Unit centroids of the directions of `points`, by Lloyd's algorithm from a k-means++ start.

    Args:
        points: [P, dim] float32 on the CPU, P >= clusters.
        clusters: number of centroids.
        generator: makes the result repeatable.

    Returns:
        [clusters, dim], rows of length one.
    """
    directions = torch.nn.functional.normalize(points, dim=1)
    centroids = _plus_plus(directions, clusters, generator)
    for _ in range(ITERATIONS):
        similarity = directions @ centroids.T
        best, member = similarity.max(1)
        sums = torch.zeros_like(centroids).index_add_(0, member, directions)
        empty = torch.bincount(member, minlength=clusters) == 0
        if empty.any():  # restart them at the points that are served worst
            sums[empty] = directions[best.argsort()[: int(empty.sum())]]
        updated = torch.nn.functional.normalize(sums, dim=1)
        if torch.equal(updated, centroids):
            break
        centroids = updated
    return centroids


def _plus_plus(directions: Tensor, clusters: int, generator: torch.Generator) -> Tensor:
    """Starting centroids: each next one drawn in proportion to its distance from those before."""
    first = torch.randint(len(directions), (1,), generator=generator)
    chosen = [directions[first]]
    distance = 1 - directions @ chosen[0].T
    for _ in range(clusters - 1):
        weights = distance[:, 0].clamp_min(0) + torch.finfo(distance.dtype).tiny
        index = torch.multinomial(weights, 1, generator=generator)
        chosen.append(directions[index])
        distance = torch.minimum(distance, 1 - directions @ chosen[-1].T)
    return torch.cat(chosen)
