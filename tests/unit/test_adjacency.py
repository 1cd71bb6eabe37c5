"""Parameters beside each other in memory: same objects, same values, storages of their own."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from liveroll.model.adjacency import lay_apart, lay_together, lie_together, span


def parameters(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(rows, 16, generator=generator).to(dtype)) for rows in (8, 4, 4)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_one_matrix_spans_them(dtype):
    """Guards against rows in another order, values that are lost, and a matrix that is a copy."""
    given = parameters(dtype)
    values = [parameter.detach().clone() for parameter in given]
    assert not lie_together(given)
    lay_together(given)
    assert lie_together(given)
    assert all(torch.equal(parameter, value) for parameter, value in zip(given, values, strict=True))
    matrix = span(given)
    assert torch.equal(matrix, torch.cat(values))
    with torch.no_grad():
        given[1].add_(1)
    assert torch.equal(matrix[8:12], values[1] + 1)
    assert torch.equal(given[2], values[2])


def test_a_vector_spans_biases():
    """Guards against parameters of one dimension, and of one number."""
    given = [nn.Parameter(torch.full((rows,), float(rows))) for rows in (3, 1, 2)]
    lay_together(given)
    assert span(given).tolist() == [3.0, 3.0, 3.0, 1.0, 2.0, 2.0]


def test_each_keeps_a_storage_of_its_own_size():
    """Guards against views of one storage: accelerate saves one of those and drops the others."""
    given = parameters()
    lay_together(given)
    storages = [parameter.untyped_storage() for parameter in given]
    assert [storage.nbytes() for storage in storages] == [parameter.nbytes for parameter in given]
    assert [storage.data_ptr() for storage in storages] == [parameter.data_ptr() for parameter in given]
    assert [parameter.storage_offset() for parameter in given] == [0, 0, 0]


def test_what_is_differentiated_stays():
    """Guards against parameters that lose their gradient, or a graph made before that cannot be gone back over."""
    given = parameters()
    loss = sum((parameter * parameter).sum() for parameter in given)
    (given[0].sum() * 2).backward()
    lay_together(given)
    assert torch.equal(given[0].grad, torch.full((8, 16), 2.0))
    given[0].grad = None
    loss.backward()
    assert all(torch.equal(parameter.grad, 2 * parameter) for parameter in given)
    assert not lie_together([parameter.grad for parameter in given])


def test_the_old_memory_goes_as_each_moves():
    """Guards against two copies of the weights at once."""
    arrays = [np.ones((rows, 16), np.float32) for rows in (8, 4)]
    given = [nn.Parameter(torch.from_numpy(array)) for array in arrays]
    held = [weakref.ref(array) for array in arrays]
    del arrays
    assert all(ref() is not None for ref in held)
    lay_together(given)
    assert all(ref() is None for ref in held)


def test_the_buffer_goes_with_the_last():
    """Guards against a matrix that keeps memory which the model has left."""
    given = parameters()
    lay_together(given)
    matrix = span(given)
    held = [StorageWeakRef(parameter.untyped_storage()) for parameter in given]
    lay_apart(given)
    assert all(ref.expired() for ref in held)
    assert not lie_together(given)
    assert matrix.shape == (16, 16)


def test_apart_they_have_their_values():
    """Guards against parameters that lose their values or are replaced when they are separated."""
    given = parameters()
    values = [parameter.detach().clone() for parameter in given]
    lay_together(given)
    lay_apart(given)
    assert all(torch.equal(parameter, value) for parameter, value in zip(given, values, strict=True))
    assert all(isinstance(parameter, nn.Parameter) for parameter in given)
