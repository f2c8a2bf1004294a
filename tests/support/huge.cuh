// Matrices with more elements than 32 bits hold. They stay on the GPU: made there by a hash that the host can repeat.
#pragma once

#include "gpu.cuh"

namespace test {

inline __host__ __device__ uint16_t hashed_half(uint64_t i) {
  i = (i + 0x9e3779b97f4a7c15ull) * 0xbf58476d1ce4e5b9ull;
  i ^= i >> 29;
  i *= 0x94d049bb133111ebull;
  i ^= i >> 32;
  // 1/8 to 4, both signs
  return static_cast<uint16_t>((i & 1) << 15 | (12 + (i >> 1) % 5) << 10 | ((i >> 8) & 1023));
}

static __global__ void fill_hashed(uint16_t* p, int64_t n) {
  for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < n; i += int64_t(gridDim.x) * blockDim.x)
    p[i] = hashed_half(i);
}

// How many rows do not sum to 1; a warp each.
static __global__ void count_bad_sums(const k::half* p, int64_t rows, int64_t cols, int64_t ld,
                                      unsigned long long* bad) {
  const int64_t warps = int64_t(gridDim.x) * blockDim.x / 32;
  for (int64_t row = (blockIdx.x * int64_t(blockDim.x) + threadIdx.x) / 32; row < rows; row += warps) {
    float sum = 0;
    for (int64_t c = threadIdx.x % 32; c < cols; c += 32) sum += __half2float(p[row * ld + c]);
    for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
    if (threadIdx.x % 32 == 0 && !(fabsf(sum - 1.f) < 5e-3f)) atomicAdd(bad, 1ull);
  }
}

static __global__ void count_others(const uint16_t* p, int64_t n, uint16_t expected, unsigned long long* bad) {
  unsigned long long others = 0;
  for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < n; i += int64_t(gridDim.x) * blockDim.x)
    others += p[i] != expected;
  if (others) atomicAdd(bad, others);
}

// Device memory without a copy on the host, with a guarded end on either side.
class Huge {
 public:
  static constexpr int64_t guard = 4096;

  explicit Huge(int64_t elements) : elements_(elements) {
    check_cuda(cudaMalloc(&base_, size_t(elements) * 2 + 2 * guard));
    check_cuda(cudaMalloc(&counter_, sizeof(*counter_)));
    poison();
  }
  ~Huge() {
    cudaFree(base_);
    cudaFree(counter_);
  }
  Huge(const Huge&) = delete;
  Huge& operator=(const Huge&) = delete;

  k::half* data() const { return reinterpret_cast<k::half*>(base_ + guard); }
  void poison() {
    check_cuda(cudaMemset(base_, 0xa5, size_t(elements_) * 2 + 2 * guard));
    check_cuda(cudaDeviceSynchronize());
  }
  void hash() {
    fill_hashed<<<2048, 256>>>(reinterpret_cast<uint16_t*>(data()), elements_);
    check_cuda(cudaDeviceSynchronize());
  }
  std::vector<k::half> read(int64_t from, int64_t count) const {
    std::vector<k::half> out(static_cast<size_t>(count));
    check_cuda(cudaMemcpy(out.data(), data() + from, size_t(count) * 2, cudaMemcpyDeviceToHost));
    return out;
  }
  bool poisoned(int64_t from, int64_t count) const {
    for (const k::half& x : read(from, count)) {
      uint16_t bits;
      std::memcpy(&bits, static_cast<const void*>(&x), 2);
      if (bits != 0xa5a5) return false;
    }
    return true;
  }
  bool intact() const { return poisoned(-guard / 2, guard / 2) && poisoned(elements_, guard / 2); }

  unsigned long long bad_sums(int64_t rows, int64_t cols, int64_t ld) {
    check_cuda(cudaMemset(counter_, 0, sizeof(*counter_)));
    count_bad_sums<<<2048, 256>>>(data(), rows, cols, ld, counter_);
    return counted();
  }
  unsigned long long others(int64_t n, uint16_t expected) {
    check_cuda(cudaMemset(counter_, 0, sizeof(*counter_)));
    count_others<<<2048, 256>>>(reinterpret_cast<const uint16_t*>(data()), n, expected, counter_);
    return counted();
  }

 private:
  unsigned long long counted() const {
    check_cuda(cudaGetLastError());
    unsigned long long bad = ~0ull;
    check_cuda(cudaMemcpy(&bad, counter_, sizeof(bad), cudaMemcpyDeviceToHost));
    return bad;
  }

  int64_t elements_;
  char* base_ = nullptr;
  unsigned long long* counter_ = nullptr;
};


inline bool enough_memory(int64_t gigabytes) {
  size_t free = 0, total = 0;
  check_cuda(cudaMemGetInfo(&free, &total));
  return free >= size_t(gigabytes) << 30;
}

}  // namespace test
