// Encodes tensor maps for TMA (sm_90). The driver's function is looked up at run time, so that the driver need not be
// linked.
#pragma once

#include <cuda.h>

#include "../exec.cuh"

KERNELS_BEGIN
namespace detail {

// A tensor of elements of one or two bytes. A box is 128 bytes wide, and has the 128-byte swizzle in shared memory:
// rows of 128 bytes in which 16-byte chunk i is at i ^ (row % 8).
template <int kRank>
struct MappedTensor {
  const void* from;
  int element_bytes;
  int64_t columns;
  int64_t extents[kRank - 1], strides[kRank - 1];  // of the dimensions after columns; strides in elements
};
// Rows of heads of blocks. A box has box_rows of one head, then of the next heads, then of those of the next blocks.
struct MappedRows {
  const void* from;
  int element_bytes;
  int64_t columns, rows, heads, blocks;
  int64_t row_stride, head_stride, block_stride;  // in elements
};

KERNELS_OF_THIS_LIBRARY inline decltype(&cuTensorMapEncodeTiled) tensor_map_encoder() {
  static const auto found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                               cudaEnableDefault, &result);
#else
    const cudaError_t error = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &result);
#endif
    return from_cuda(error) && result == cudaDriverEntryPointSuccess
               ? reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function)
               : nullptr;
  }();
  return found;
}

// False if there can be no map: without a driver that encodes them, or with strides that it does not accept.
// The L2 fetches 128 bytes at a time. With 256, on an H200 (CUDA 13.0, 2026-11), attention took up to 3 % longer (64
// single queries on 4,096 keys 275 us instead of 266, latents of 32 sequences and 128 heads 81.8 instead of 80.7), and
// products of 64 tokens up to 3 %; with 129 tokens and more they differed by less than their noise.
template <int kRank>
KERNELS_OF_THIS_LIBRARY bool make_tensor_map(const Exec& ex, const MappedTensor<kRank>& tensor,
                                             const int (&box_of)[kRank - 1], arch::TensorMap& map) {
  static_assert(sizeof(CUtensorMap) == sizeof(arch::TensorMap), "a tensor map has 128 bytes");
  const auto encode = tensor_map_encoder();
  if (encode == nullptr) return false;
  cuuint64_t dims[kRank] = {cuuint64_t(tensor.columns)}, bytes[kRank - 1];
  cuuint32_t box[kRank] = {cuuint32_t(128 / tensor.element_bytes)}, steps[kRank] = {1};
  for (int i = 0; i + 1 < kRank; ++i) {
    dims[i + 1] = cuuint64_t(tensor.extents[i]), box[i + 1] = cuuint32_t(box_of[i]), steps[i + 1] = 1;
    bytes[i] = cuuint64_t(tensor.strides[i]) * tensor.element_bytes;
    if (tensor.extents[i] == 1) bytes[i] = 16;  // not used, but must be valid
    if (bytes[i] == 0 || bytes[i] % 16 != 0 || bytes[i] >= cuuint64_t(1) << 40) return false;
  }
  const CUtensorMapDataType type =
      tensor.element_bytes == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_UINT16;
  const int device = ex.device().device;
  const CurrentDevice current(device);
  // A thread that has not used the runtime yet has no context until it sets its device.
  static thread_local int named = -1;
  if (named != device && from_cuda(cudaSetDevice(device))) named = device;
  return encode(reinterpret_cast<CUtensorMap*>(&map), type, kRank, const_cast<void*>(tensor.from), dims, bytes, box,
                steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}
KERNELS_OF_THIS_LIBRARY inline bool make_tensor_map(const Exec& ex, const MappedRows& tensor, int box_rows,
                                                    arch::TensorMap& map, int box_heads = 1, int box_blocks = 1) {
  return make_tensor_map<4>(ex,
                            {tensor.from,
                             tensor.element_bytes,
                             tensor.columns,
                             {tensor.rows, tensor.heads, tensor.blocks},
                             {tensor.row_stride, tensor.head_stride, tensor.block_stride}},
                            {box_rows, box_heads, box_blocks}, map);
}

}  // namespace detail
KERNELS_END
