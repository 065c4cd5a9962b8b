import numpy as np
import torch

from hardpoint.worker.sampling.buffers import SharedArray, StagedWriteTensor, UvaBackedTensor

CPU = torch.device("cpu")


def test_a_shared_array_is_one_memory_on_a_cpu():
    array = np.arange(4, dtype=np.int32)
    shared = SharedArray(array, CPU)
    array[2] = 9
    assert shared.gpu.tolist() == [0, 1, 9, 3]


def test_a_uva_tensor_starts_at_zero():
    tensor = UvaBackedTensor((2, 3), torch.int32)
    tensor.np[1, 2] = 5
    assert tensor.gpu.tolist() == [[0, 0, 0], [0, 0, 5]]


def test_staged_writes_wait_for_apply_and_keep_their_order():
    tensor = StagedWriteTensor((2, 5), torch.int32, CPU)
    tensor.stage_write(1, 2, [7, 8])
    tensor.stage_write(1, 3, [9])
    assert not tensor.gpu.any()
    tensor.apply_write()
    assert tensor.gpu.tolist() == [[0] * 5, [0, 0, 7, 9, 0]]
    tensor.stage_write(0, 0, [1])
    tensor.clear_staged_writes()
    tensor.apply_write()
    assert tensor.gpu[0].tolist() == [0] * 5


def test_single_elements_can_be_staged():
    tensor = StagedWriteTensor(3, torch.float32, CPU, max_concurrency=2)
    tensor.stage_write_elem(2, 1.5)
    tensor.apply_write()
    assert tensor.gpu.tolist() == [0.0, 0.0, 1.5]
