// Attention with products of 8 bits beside the same call without: weights lose all but 3 bits behind the first, and
// nothing else is different.
#include "support/gpu_attention.cuh"

using namespace test;

namespace {

using E = k::float8_e4m3;

k::AttentionPlan plan_of(const k::Exec& ex, int64_t dim, bool in_8_bits, int shift = 0) {
  const E* p = reinterpret_cast<const E*>(uintptr_t(1) << 20);  // planned with, never read
  k::AttentionPlan plan;
  REQUIRE(k::attention_plan<128>(ex, k::load(p, dim),
                                 k::dense_kv(k::nhd(p + shift, 256, 1, dim), k::nhd(p, 256, 1, dim), 256),
                                 k::store(reinterpret_cast<k::half*>(uintptr_t(1) << 30), dim), {1, 256, 1, 1, dim},
                                 k::causal(), k::Attention{}.in_8_bits(in_8_bits), plan));
  return plan;
}

// Scale: of keys. with_workspace: keys are split.
template <class Scale = k::Nothing, class S>
void near_to_half(Tally& t, const char* what, const AttentionCase& c, Layout layout, const S& score,
                  bool with_workspace = false) {
  if (t.leaves_out()) return;
  const std::string name = std::string(what) + ", " + c.describe();
  const Placement where(layout, c.kv_lens, c.kv_heads, 16);
  const KvSide<E, Scale, DeviceMemory> key(1, where, c.dim, ScaleOf::token,
                                           std::is_same<Scale, k::Nothing>::value ? 1 : 10, 0, 16);
  const KvSide<E, k::Nothing, DeviceMemory> value(2, where, c.value_dim(), ScaleOf::token, 1, 0, 16);
  AttentionData<E, float, DeviceMemory> data(c);
  const OnDevice<int32_t> offsets(data.offsets);
  k::AttentionShape shape = data.shape();
  if (c.ragged_q) shape.q_offsets = offsets.data();
  const int64_t rows = data.o.rows(), width = c.heads * c.value_dim();
  Device<float> one(rows, width, width), other(rows, width, width), one_lse(rows, c.heads, c.heads),
      other_lse(rows, c.heads, c.heads);
  Stream stream;
  const k::Exec ex(stream);
  with_view(where, key, value, [&](const auto& kv) {
    const auto run = [&](bool in_8_bits, Device<float>& o, Device<float>& lse) {
      const k::Attention options = k::Attention{}.lse(lse.data()).in_8_bits(in_8_bits);
      const auto q = data.source();
      k::Status status;
      if (with_workspace) {
        const size_t bytes = k::attention_workspace_bytes(ex, shape, options);
        Device<unsigned char> memory(1, int64_t(bytes), int64_t(bytes));
        status = k::attention<128>(ex, q, kv, k::store(o.data(), width), shape, score,
                                   k::Workspace{memory.data(), bytes}, options);
        stream.wait();
      } else {
        status = k::attention<128>(ex, q, kv, k::store(o.data(), width), shape, score, options);
      }
      t.expect(status.ok(), "%s: %s", what, status.reason());
      stream.wait();
      o.download(), lse.download();
      t.expect(o.intact() && lse.intact(), "%s: wrote outside", name.c_str());
    };
    run(true, one, one_lse);
    run(false, other, other_lse);
  });
  double squares = 0, of_difference = 0;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t h = 0; h < c.heads; ++h) {
      const float a = one_lse.get(r, h), b = other_lse.get(r, h);
      // Twice what sums of products of 8 bits may lose: 2^-12 of what is added, which is some 7 here.
      t.expect(a == b || std::fabs(a - b) <= 4e-3f, "%s: logsumexp of row %d, head %d: %g and %g", name.c_str(), int(r),
               int(h), a, b);
    }
    for (int64_t x = 0; x < width; ++x) {
      const double a = one.get(r, x), b = other.get(r, x);
      squares += b * b, of_difference += (a - b) * (a - b);
      // Normal values: each weight is off by 2^-4 at most.
      t.expect(std::fabs(a - b) <= 0.25, "%s: row %d, column %d: %g and %g", name.c_str(), int(r), int(x), a, b);
    }
  }
  t.expect(of_difference <= 0.035 * 0.035 * squares, "%s: %g of the results is lost", name.c_str(),
           std::sqrt(of_difference / squares));
}

// Leaves bytes in the shared memory of all multiprocessors that are NaN as values of 8 bits.
__global__ void leave_nan() {
  extern __shared__ uint32_t words[];
  for (int i = threadIdx.x; i < int(227 * 1024 / 4); i += blockDim.x) words[i] = 0x7f7f7f7f;
  __syncthreads();
  if (words[threadIdx.x] == 0) __trap();
}
void poison_shared_memory() {
  REQUIRE(cudaFuncSetAttribute(leave_nan, cudaFuncAttributeMaxDynamicSharedMemorySize, 227 * 1024) == cudaSuccess);
  leave_nan<<<4 * sm_count(), 256, 227 * 1024>>>();
  REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
}

}  // namespace

TEST_CASE("attention in 8 bits: taken where it can be, and near to what it is without") {
  Stream stream;
  const k::Exec ex(stream);
  if (plan_of(ex, 128, true).tile_rows != 192) return skip("needs kernels compiled for sm_90a, and such a GPU");
  CHECK(plan_of(ex, 128, true).tile_keys == 96);
  CHECK(plan_of(ex, 128, true).why_not == std::string());
  CHECK(plan_of(ex, 128, true).box_rows == 96);
  CHECK(plan_of(ex, 128, false).tile_rows == 128);
  CHECK(plan_of(ex, 128, false).why_not != std::string());
  CHECK(plan_of(ex, 16, true).tile_rows == 192);
  CHECK(plan_of(ex, 72, true).tile_rows == 128);
  CHECK(plan_of(ex, 128, true, 8).tile_rows == 128);
  Tally t;
  for (const auto& [dim, v_dim] : {std::pair<int64_t, int64_t>{128, 128}, {64, 96}, {16, 112}, {64, 64}, {128, 48}}) {
    for (const int64_t queries : {1, 65, 192, 193, 500}) {
      for (const int64_t keys : {0, 1, 95, 96, 97, 192, 300, 1000}) {
        AttentionCase c{{queries, queries / 2, 3}, {keys, keys / 3 * 2, 200}, 6, queries % 2 == 0 ? 2 : 6, dim, v_dim};
        c.ragged_q = true, c.aligned = true;
        near_to_half(t, "causal", c, Layout::nhd, k::causal());
        near_to_half(t, "window and cap, in pages", c, Layout::paged_nhd, k::window(100, 30) & k::soft_cap(20.f));
      }
    }
  }
  // Columns that heads do not have, in tiles that are not whole.
  for (const int64_t dim : {16, 32, 48, 64, 80, 96, 112}) {
    AttentionCase c{{70, 20}, {70, 60}, 4, 2, dim, 112 - dim > 0 ? 112 - dim + 16 : 16};
    c.ragged_q = true, c.aligned = true;
    poison_shared_memory();
    near_to_half(t, "fewer columns", c, Layout::nhd, k::causal());
  }
  AttentionCase scaled{{200, 200, 200}, {333, 200, 0}, 6, 2, 128};
  scaled.aligned = true;
  near_to_half<float>(t, "scales of keys", scaled, Layout::nhd, k::causal());
  AttentionCase chunk{{64, 10}, {5000, 3000}, 8, 2, 128};
  chunk.ragged_q = true, chunk.aligned = true;
  near_to_half(t, "a chunk", chunk, Layout::nhd, k::causal(), true);
  AttentionCase many{{}, {}, 16, 4, 128};
  for (int i = 0; i < 600; ++i) many.q_lens.push_back(i % 7 * 20), many.kv_lens.push_back(i % 5 * 20 + i % 3);
  many.ragged_q = true, many.aligned = true;
  near_to_half(t, "many sequences", many, Layout::nhd, k::causal());
  AttentionCase short_ones{{}, {}, 8, 8, 128};
  for (int i = 0; i < 70; ++i) short_ones.q_lens.push_back(130), short_ones.kv_lens.push_back(130 + i % 3 * 100);
  short_ones.aligned = true;
  near_to_half(t, "short", short_ones, Layout::nhd, k::causal());
  CHECK_TALLY(t);
}
