// Decoding of short sequences. Reading a few hundred keys takes less time than setting up the schedule, the pipeline
// and the workspace of decode_tensor.cuh, so this kernel has none of them.
//
//   item:  one sequence, one KV head, a tile of up to 8 rows; processed by a cluster of 1 to 16 blocks
//
//   block 0:  warp 0: keys 0-15 | warp 1: 16-31 | ... | warp 7 |   (m, l, o) of warps  -> shared memory
//   block 1:  warp 0: keys 128-143 | ...     (m, l, o) of blocks -> memory of block 0 -> sink
//
// A warp loads two tiles of keys at a time into registers, in memory order: mma and movmatrix take them without
// rearranging, as the order of a head's columns is free if queries have the same. Only as many blocks work as there are
// keys for; the others exit. Weights are multiplied with values as sums of two 16-bit numbers, as in
// DecodeMode::precise. kEarly: old keys are loaded before the previous kernel has ended (Attention::new_keys). That is
// a separate kernel: in a common one, calls that load nothing early took 0.5 us longer (H200).
#pragma once

#include "flash_decode.cuh"

KERNELS_BEGIN
namespace detail {

template <class P, int kDim, bool kEarly = false>
struct ShortDecodeBody {
  static constexpr int kWarps = 8, kRows = 8, kMostBlocks = 16;
  static constexpr int max_threads = kWarps * 32, registers = kDim > 64 ? 255 : 168;
  static constexpr int kBlocksOnEach = 1;  // per multiprocessor
  static constexpr int kDeep = 2;          // tiles of keys in registers or in flight, per warp
  static constexpr bool waits_for_predecessor_itself = true;
  using Params = P;
  using Key = typename KeyRun<typename P::Kv>::Codes;
  using Value = typename ValueRun<typename P::Kv>::Codes;
  using KeyType = key_meeting_type<typename P::Q, typename P::Kv>;
  using ValueType = typename Coded<Value>::Code;
  static constexpr int kQueryParts = std::is_same<tensor_type<typename P::Q>, KeyType>::value ? 1 : 2;
  static constexpr int kQueryPack = wide_pack<typename P::Q>;
  static constexpr int kChunks = kDim / 32;  // of 8 columns, per lane
  static constexpr int kPitch = kDim + 4;    // floats of a row of sums

  static __host__ __device__ constexpr size_t partial_bytes(int rows) {
    return size_t(rows) * kPitch * sizeof(float) + kRows * sizeof(float2);
  }
  // Shared memory for the partial results of all warps, and of all blocks of the cluster.
  static size_t shared_bytes(int rows, int cluster) {
    return size_t(kWarps + (cluster > 1 ? cluster : 0)) * partial_bytes(rows);
  }

  static __device__ __forceinline__ void run(const P& p) {
    extern __shared__ __align__(
        128) unsigned char shared[];  // 128: the compiler keeps one alignment for all that have this name
    const unsigned blocks = arch::cluster_size(), rank = arch::cluster_rank();
    if (blocks > 1) arch::cluster_arrive_relaxed();  // other blocks will write to this block's memory
    const unsigned item = blockIdx.x / blocks, heads = unsigned(p.shape.kv_heads);
    DecodePart part;
    part.b = int(item / heads), part.head = int(item - unsigned(part.b) * heads), part.tile = int(blockIdx.y);
    const int warp = threadIdx.x / 32;
    if (!kEarly) arch::grid_dependency_pass();

    compute_rows_and_keys(p, part);
    const unsigned tiles = unsigned(part.end - part.begin + kDecodeKeys - 1) / kDecodeKeys;
    const unsigned active_blocks = lesser(blocks, greater(1u, (tiles + kWarps - 1) / kWarps));
    if (part.rows == 0 || rank >= active_blocks) {
      if (kEarly) arch::grid_dependency_pass();
      return;
    }

    ShortDecodeBody body(p, part);
    body.take_tiles(rank * kWarps + warp, tiles, active_blocks * kWarps);
    Partials warp_partials(shared, part.rows, kWarps);
    body.store_partials(warp_partials, warp);
    __syncthreads();

    Partials all(shared + warp_partials.bytes(), part.rows, int(blocks));
    if (active_blocks > 1) arch::cluster_wait();  // all blocks have started
    const int packs = int(unsigned(p.v_dim) / 4), present = int(lesser(unsigned(kWarps), tiles - rank * kWarps));
    each_result(part.rows, packs, [&](int row, int col) {
      float2 state;
      const Pack<float, 4> sums = warp_partials.merged(tiles == 0 ? 0 : present, row, col, state);
      if (active_blocks == 1) {
        DecodeRow<P>(p, part.b, part.head, part.tile * kRows + row, state.x, state.y).write(sums, col);
      } else {
        put_floats(arch::in_block(all.sums(int(rank), row, col), 0), sums);
        if (col == 0) *arch::in_block(all.state(int(rank), row), 0) = state;
      }
    });
    if (active_blocks == 1) return;
    arch::cluster_arrive();
    if (rank != 0) return;
    arch::cluster_wait();
    each_result(part.rows, packs, [&](int row, int col) {
      float2 state;
      const Pack<float, 4> sums = all.merged(int(active_blocks), row, col, state);
      DecodeRow<P>(p, part.b, part.head, part.tile * kRows + row, state.x, state.y).write(sums, col);
    });
  }

 private:
  using Weights = DecodeWeights<P, 1>;
  using QueryPack = decltype(fetch<kQueryPack>(std::declval<const typename P::Q&>(), kAny, kAny));

  static __device__ __forceinline__ void compute_rows_and_keys(const P& p, DecodePart& part) {
    const int q_len = int(p.shape.queries(part.b)), rows = q_len * p.group;
    int first_query = 0, last_query = q_len - 1;
    part.rows = rows;
    if (p.tiles > 1) {  // a single tile needs no divisions, which took 0.1 us
      const int first = part.tile * kRows;
      part.rows = greater(0, lesser(kRows, rows - first));
      first_query = p.query_of(first), last_query = p.query_of(first + part.rows - 1);
    }
    const KeyRange seen = key_range(p.score, {part.b, first_query, last_query, q_len, p.kv.length(part.b)});
    part.begin = int(seen.begin), part.end = greater(part.begin, int(seen.end));
  }
  // Calls f(row, column) for each four columns of the results, distributed over the threads of the block; `packs` per
  // row.
  template <class F>
  static __device__ __forceinline__ void each_result(int rows, int packs, const F& f) {
    for (int i = threadIdx.x; i < rows * packs; i += max_threads) {
      const int row = int(unsigned(i) / unsigned(packs));
      f(row, (i - row * packs) * 4);
    }
  }

  // Partial results of warps, or of blocks: for each row a softmax state, and the sum of weighted values relative to
  // it.
  class Partials {
   public:
    __device__ __forceinline__ Partials(unsigned char* shared, int rows, int count)
        : sums_(reinterpret_cast<float*>(shared)), rows_(rows), count_(count) {}
    __device__ __forceinline__ size_t bytes() const { return count_ * partial_bytes(rows_); }
    __device__ __forceinline__ float* sums(int from, int row, int col) const {
      return sums_ + (from * rows_ + row) * kPitch + col;
    }
    __device__ __forceinline__ float2* state(int from, int row) const {
      return reinterpret_cast<float2*>(sums_ + count_ * rows_ * kPitch) + from * kRows + row;
    }
    // Merges the first `count` partial results, in order.
    __device__ __forceinline__ Pack<float, 4> merged(int count, int row, int col, float2& whole) const {
      whole = make_float2(-infinity<float>(), 0.f);
      KERNELS_ROLLED
      for (int i = 0; i < count; ++i) whole.x = greater(whole.x, state(i, row)->x);
      const float reference = softmax_reference(whole.x);
      Pack<float, 4> all = broadcast<4>(0.f);
      KERNELS_ROLLED
      for (int i = 0; i < count; ++i) {
        const float2 one = *state(i, row);
        const float factor = arch::exp2_flushed(one.x - reference);
        whole.y += one.y * factor;
        all = all + floats_at<4>(sums(i, row, col)) * factor;
      }
      return all;
    }

   private:
    float* sums_;
    int rows_, count_;
  };

  __device__ __forceinline__ ShortDecodeBody(const P& p, const DecodePart& part) : p_(p), part_(part) {
    weights_.begin(p, part);
    KERNELS_UNROLL
    for (int m = 0; m < 2 * kChunks; ++m) {
      KERNELS_UNROLL
      for (int i = 0; i < 4; ++i) sums_[m][i] = 0.f;
    }
  }

  // Processes the warp's tiles of keys: every `step`-th one, from `tile` on. With kEarly the first ones are loaded
  // before the previous kernel has ended, if all of their keys are old.
  __device__ __forceinline__ void take_tiles(unsigned tile, unsigned tiles, unsigned step) {
    [[maybe_unused]] unsigned ready = 0;  // the tiles whose keys are all old
    if constexpr (kEarly) {
      const int64_t old = p_.options.ready_keys(p_.kv.length(part_.b)) - part_.begin;
      ready = unsigned(lesser<int64_t>(tiles, greater<int64_t>(0, old) / kDecodeKeys));
      KERNELS_UNROLL
      for (int i = 0; i < kDeep; ++i) {
        if (tile + i * step < ready) prefetch_both<true>(i, tile + i * step);
      }
      arch::grid_dependency_pass();
    }
    prefetch_queries();
    KERNELS_UNROLL
    for (int i = 0; i < kDeep; ++i) {
      if (tile + i * step < tiles && (!kEarly || tile + i * step >= ready)) prefetch_both<false>(i, tile + i * step);
    }
    take_queries();
    while (tile < tiles) {
      KERNELS_UNROLL
      for (int i = 0; i < kDeep && tile < tiles; ++i, tile += step) {
        const unsigned next = tile + kDeep * step;
        float x[1][4] = {};
        multiply_keys(i, x);
        if (next < tiles) prefetch_keys<false>(i, next);
        weigh(x, tile);
        multiply_values(i, x);
        if (next < tiles) prefetch_values<false>(i, next);
      }
    }
  }

  // Lane 4g + t has columns of row g (a query, or keys g and g + 8 of a tile): chunk j of 8 begins at column(j).
  static __device__ __forceinline__ int lane() { return threadIdx.x & 31; }
  static __device__ __forceinline__ int column(int j) { return (j * 4 + lane() % 4) * 8; }

  __device__ __forceinline__ void prefetch_queries() {
    const int row = part_.tile * kRows + lane() / 4, token = p_.query_of(row);
    token_ = p_.shape.first_query(part_.b) + token;
    first_column_ = (int64_t(part_.head) * p_.group + (row - token * p_.group)) * p_.dim;
    KERNELS_UNROLL
    for (int j = 0; j < kChunks; ++j) {
      KERNELS_UNROLL
      for (int i = 0; i < 8 / kQueryPack; ++i) {
        if (there(j)) prefetched_[j][i] = fetch<kQueryPack>(p_.q, token_, first_column_ + column(j) + i * kQueryPack);
      }
    }
  }
  __device__ __forceinline__ bool there(int j) const { return lane() / 4 < part_.rows && column(j) < p_.dim; }
  __device__ __forceinline__ void take_queries() {
    KERNELS_UNROLL
    for (int j = 0; j < kChunks; ++j) {
      Pack<float, 8> v = broadcast<8>(0.f);
      KERNELS_UNROLL
      for (int i = 0; i < 8 / kQueryPack; ++i) {
        if (!there(j)) break;
        const Pack<float, kQueryPack> some =
            resolve(p_.q, prefetched_[j][i], token_, first_column_ + column(j) + i * kQueryPack);
        KERNELS_UNROLL
        for (int n = 0; n < kQueryPack; ++n) v.v[i * kQueryPack + n] = some.v[n];
      }
      KERNELS_UNROLL
      for (int part_of = 0; part_of < kQueryParts; ++part_of) {
        const Pack<KeyType, 8> rounded = convert<KeyType>(v);
        memcpy(queries_[part_of][j], rounded.v, 16);
        v = transform(v - convert<float>(rounded), [](float x) { return x - x == 0.f ? x : 0.f; });
      }
    }
  }

  // Loads the keys, or values, of a tile; run(key) returns the columns of one. Missing keys and columns are zeros.
  // kPastL1: the loads bypass the L1, where data beside these keys that is still to be written would become stale.
  using Words = uint32_t[2][kChunks][4];
  template <bool kPastL1, class Run>
  __device__ __forceinline__ void prefetch(Words& words, unsigned tile, int dim, const Run& run) const {
    KERNELS_UNROLL
    for (int i = 0; i < 2; ++i) {
      const uint32_t key = uint32_t(part_.begin) + tile * kDecodeKeys + lane() / 4 + 8 * i;
      const auto one = run(lesser(int(key), part_.end - 1));
      const char* const from = reinterpret_cast<const char*>(one.codes.at(0, 0));
      KERNELS_UNROLL
      for (int j = 0; j < kChunks; ++j) {
        ::uint4 some = make_uint4(0, 0, 0, 0);
        if (key < uint32_t(part_.end) && column(j) < dim) {
          const auto* const p = reinterpret_cast<const ::uint4*>(from + column(j) * 2);
          some = kPastL1 ? __ldcg(p) : *p;
        }
        words[i][j][0] = some.x, words[i][j][1] = some.y, words[i][j][2] = some.z, words[i][j][3] = some.w;
      }
    }
  }
  template <bool kPastL1>
  __device__ __forceinline__ void prefetch_keys(int buffer, unsigned tile) {
    prefetch<kPastL1>(keys_[buffer], tile, p_.dim, [this](int key) { return p_.kv.key(part_.b, part_.head, key); });
  }
  template <bool kPastL1>
  __device__ __forceinline__ void prefetch_values(int buffer, unsigned tile) {
    prefetch<kPastL1>(values_[buffer], tile, p_.v_dim,
                      [this](int key) { return p_.kv.value(part_.b, part_.head, key); });
  }
  template <bool kPastL1>
  __device__ __forceinline__ void prefetch_both(int buffer, unsigned tile) {
    prefetch_keys<kPastL1>(buffer, tile), prefetch_values<kPastL1>(buffer, tile);
  }

  __device__ __forceinline__ void multiply_keys(int buffer, float (&x)[1][4]) const {
    KERNELS_UNROLL
    for (int j = 0; j < kChunks; ++j) {
      KERNELS_UNROLL
      for (int w = 0; w < 4; w += 2) {
        const uint32_t a[4] = {keys_[buffer][0][j][w], keys_[buffer][1][j][w], keys_[buffer][0][j][w + 1],
                               keys_[buffer][1][j][w + 1]};
        KERNELS_UNROLL
        for (int part_of = 0; part_of < kQueryParts; ++part_of) {
          const uint32_t b[2] = {queries_[part_of][j][w], queries_[part_of][j][w + 1]};
          arch::mma_16816<KeyType>(x[0], a, b);
        }
      }
    }
  }
  __device__ __forceinline__ void weigh(float (&x)[1][4], unsigned tile) {
    const uint32_t key = uint32_t(part_.begin) + tile * kDecodeKeys;
    weights_.weigh(p_, part_, x, key, kDecodeKeys, [&](const typename Weights::Factors& factors) {
      KERNELS_UNROLL
      for (int m = 0; m < 2 * kChunks; ++m) {
        KERNELS_UNROLL
        for (int i = 0; i < 4; ++i) sums_[m][i] *= factors[0][i % 2];
      }
    });
  }
  __device__ __forceinline__ void multiply_values(int buffer, const float (&x)[1][4]) {
    uint32_t b[2][2];
    KERNELS_UNROLL
    for (int i = 0; i < 2; ++i) {
      const float low = x[0][2 * i], high = x[0][2 * i + 1];
      const uint32_t pair = rounded_pair<ValueType>(low, high);
      b[0][i] = arch::transpose_matrix(pair),
      b[1][i] = arch::transpose_matrix(rest_of_pair<ValueType>(low, high, pair));
    }
    KERNELS_UNROLL
    for (int j = 0; j < kChunks; ++j) {
      KERNELS_UNROLL
      for (int w = 0; w < 4; w += 2) {
        uint32_t a[4];
        KERNELS_UNROLL
        for (int i = 0; i < 4; ++i) a[i] = arch::transpose_matrix(values_[buffer][i / 2][j][w + i % 2]);
        arch::mma_16816<ValueType>(sums_[2 * j + w / 2], a, b[0]);
        arch::mma_16816<ValueType>(sums_[2 * j + w / 2], a, b[1]);
      }
    }
  }
  // The column of the values that row g, and g + 8 as second = 1, of operand m stands for.
  static __device__ __forceinline__ int value_column(int m, int second) {
    return (m / 2 * 4 + lane() / 8) * 8 + m % 2 * 4 + second * 2 + lane() / 4 % 2;
  }

  __device__ __forceinline__ void store_partials(const Partials& warp_partials, int warp) {
    weights_.write(warp_partials.state(warp, 0));
    KERNELS_UNROLL
    for (int j = 0; j < 2; ++j) {
      const int row = Weights::row_of(0, j);
      if (row >= part_.rows) continue;
      KERNELS_UNROLL
      for (int m = 0; m < 2 * kChunks; ++m) {
        KERNELS_UNROLL
        for (int second = 0; second < 2; ++second)
          *warp_partials.sums(warp, row, value_column(m, second)) = sums_[m][2 * second + j];
      }
    }
  }

  const P& p_;
  const DecodePart& part_;
  int64_t token_, first_column_;
  QueryPack prefetched_[kChunks][8 / kQueryPack];
  uint32_t queries_[kQueryParts][kChunks][4];
  Words keys_[kDeep], values_[kDeep];
  Weights weights_;
  float sums_[2 * kChunks][4];
};

}  // namespace detail
KERNELS_END
