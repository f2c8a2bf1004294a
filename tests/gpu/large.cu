// More rows, columns and elements than 32 bits or a grid's limits hold. Data stays on the GPU: made there by a hash
// that the host can repeat, checked there as a whole, and row by row on the host for some.
#include "support/gpu.cuh"

using namespace test;

namespace {

__host__ __device__ uint16_t hashed_half(uint64_t i) {
  i = (i + 0x9e3779b97f4a7c15ull) * 0xbf58476d1ce4e5b9ull;
  i ^= i >> 29;
  i *= 0x94d049bb133111ebull;
  i ^= i >> 32;
  // 1/8 to 4, both signs
  return static_cast<uint16_t>((i & 1) << 15 | (12 + (i >> 1) % 5) << 10 | ((i >> 8) & 1023));
}

__global__ void fill_hashed(uint16_t* p, int64_t n) {
  for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < n; i += int64_t(gridDim.x) * blockDim.x)
    p[i] = hashed_half(i);
}

// How many rows do not sum to 1; a warp each.
__global__ void count_bad_sums(const k::half* p, int64_t rows, int64_t cols, int64_t ld, unsigned long long* bad) {
  const int64_t warps = int64_t(gridDim.x) * blockDim.x / 32;
  for (int64_t row = (blockIdx.x * int64_t(blockDim.x) + threadIdx.x) / 32; row < rows; row += warps) {
    float sum = 0;
    for (int64_t c = threadIdx.x % 32; c < cols; c += 32) sum += __half2float(p[row * ld + c]);
    for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
    if (threadIdx.x % 32 == 0 && !(fabsf(sum - 1.f) < 5e-3f)) atomicAdd(bad, 1ull);
  }
}

__global__ void count_others(const uint16_t* p, int64_t n, uint16_t expected, unsigned long long* bad) {
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

bool enough_memory(int64_t gigabytes) {
  size_t free = 0, total = 0;
  check_cuda(cudaMemGetInfo(&free, &total));
  return free >= size_t(gigabytes) << 30;
}

// Hashed inputs, softmax, some rows compared with the oracle and all sums with 1.
void check_softmax(Huge& out, int64_t rows, int64_t cols, int64_t ld, const std::vector<int64_t>& samples) {
  for (const int64_t row : samples) {
    Row<float> want(static_cast<size_t>(cols));
    for (int64_t c = 0; c < cols; ++c) {
      const uint16_t bits = hashed_half(uint64_t(row * ld + c));
      k::half x;
      std::memcpy(static_cast<void*>(&x), &bits, 2);
      want[size_t(c)] = value_of(x);
    }
    softmax(want);
    const std::vector<k::half> got = out.read(row * ld, cols);
    CHECK(mismatch(row, want, [&](int64_t c) { return got[size_t(c)]; }) == "");
    if (ld > cols) CHECK(out.poisoned(row * ld + cols, ld - cols));
  }
  CHECK(out.bad_sums(rows, cols, ld) == 0);
  CHECK(out.intact());
}

}  // namespace

TEST_CASE("large: ten million rows", "[large]") {
  Stream stream;
  const int64_t rows = 10000000;
  std::vector<int64_t> samples;
  for (int64_t row = 0; row < rows; row += row < 300 || row > rows - 300 ? 1 : 99991) samples.push_back(row);
  samples.push_back(rows - 1);
  Huge in(rows * 8), out(rows * 8);
  in.hash();
  for (const int64_t cols : {3, 8}) {
    for (const k::RowPolicy& p :
         {k::RowPolicy{}, policy(k::Residency::registers, 32), policy(k::Residency::streamed, 32)}) {
      INFO(cols << " columns, " << text(p));
      out.poison();
      REQUIRE(k::softmax(stream, k::load(in.data(), cols), k::store(out.data(), cols), rows, cols, p));
      stream.wait();
      check_softmax(out, rows, cols, cols, samples);
    }
  }
}

TEST_CASE("large: more than 2^31 elements", "[large]") {
  const int64_t rows = 70000, ld = 32768;
  if (!enough_memory(12)) return skip("needs 12 GB of GPU memory");
  Stream stream;
  // Row 65536 begins at element 2^31.
  const std::vector<int64_t> samples = {0, 1, 65535, 65536, rows - 2, rows - 1};
  Huge in(rows * ld), out(rows * ld);
  in.hash();
  const auto run = [&](int64_t cols, const k::RowPolicy& p) {
    INFO(cols << " columns, " << text(p));
    out.poison();
    REQUIRE(k::softmax(stream, k::load(in.data(), ld), k::store(out.data(), ld), rows, cols, p));
    stream.wait();
    check_softmax(out, rows, cols, ld, samples);
  };
  run(ld, {});
  run(ld, policy(k::Residency::shared, 256));  // a part of the row is kept, the rest read again
  run(ld, policy(k::Residency::streamed));
  run(5000, policy(k::Residency::registers));
  run(100, {});
  run(96, policy(k::Residency::group, 16));

  // In place, and rows of one column, more than 2^31 of them.
  REQUIRE(k::softmax(stream, k::load(in.data(), ld), k::store(in.data(), ld), rows, ld));
  stream.wait();
  check_softmax(in, rows, ld, ld, samples);
  const int64_t many = (int64_t(1) << 31) + 7;
  out.poison();
  REQUIRE(k::softmax(stream, k::load(in.data(), 1), k::store(out.data(), 1), many, 1));
  stream.wait();
  CHECK(out.others(many, 0x3c00) == 0);
  CHECK(out.poisoned(many, 4096));
}

// Zeros, and 24 in the last column: log(sum) shows whether each was counted.
TEST_CASE("large: 2^30 columns", "[large]") {
  const int64_t most = int64_t(1) << 30;
  if (!enough_memory(6)) return skip("needs 6 GB of GPU memory");
  Stream stream;
  Workspace workspace(1);
  Huge in(most), out(most);
  const k::half last = make<k::half>(24);
  for (const int64_t cols : {most, most - 1}) {
    for (const k::RowPolicy& p : {k::RowPolicy{}, policy(k::Residency::shared), policy(k::Residency::streamed), policy(k::Residency::split)}) {
      if (p.residency == k::Residency::shared && !much_shared_memory()) continue;
      INFO(cols << " columns, " << text(p));
      check_cuda(cudaMemset(in.data(), 0, size_t(cols) * 2));
      check_cuda(cudaMemcpy(in.data() + cols - 1, &last, 2, cudaMemcpyHostToDevice));
      out.poison();
      REQUIRE(k::log_softmax(workspace.exec(stream), k::load(in.data(), cols), k::store(out.data(), cols), 1, cols, p));
      stream.wait();
      const double above = std::log1p(double(cols - 1) * std::exp(-24.0));
      const k::half others = make<k::half>(-24 - above), own = make<k::half>(-above);
      uint16_t bits;
      std::memcpy(&bits, static_cast<const void*>(&others), 2);
      CHECK(out.others(cols - 1, bits) == 0);
      CHECK(value_of(out.read(cols - 1, 1)[0]) == Approx(value_of(own)).epsilon(2e-3));
      CHECK(out.intact());
      if (cols < most) CHECK(out.poisoned(cols, 1));
    }
  }
}
