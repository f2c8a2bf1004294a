// Prefill kernel on CUDA cores, in float throughout: for keys or values of float, which tensor cores would round, and
// for those that a view computes.
//
//   shared memory:  | keys 32 x step | values 32 x 128 | weights 32 x 32 | queries 32 x dim |
//
//   rows  0 to 15:  half-warp i has row i ...      a block has 32 rows and processes 32 keys per iteration;
//   rows 16 to 31:  ... and row i + 16             a half-warp holds the states and outputs of two rows
//
// Heads with more than 128 value columns take a block for every 128 columns of the output.
#pragma once

#include "prefill_rows.cuh"

KERNELS_BEGIN
namespace detail {

template <class P>
struct SimtPrefillBody {
  using Kv = typename P::Kv;
  using S = typename P::S;
  using Key = KeyRun<Kv>;
  using Value = ValueRun<Kv>;
  static constexpr int kRows = 32, kKeys = 32, kDim = 0, kCols = 128, kStep = 32, kResultPack = 4,
                       kOnEach = 2;  // kDim = 0: any dimension
  static constexpr int max_threads = 256, registers = 128;
  static constexpr int kGap = 4;  // padding of rows in shared memory, in floats
  struct Params {
    P problem;
    PrefillGrid grid;
  };
  struct Tiles {
    float keys[kKeys][kStep + kGap], values[kKeys][kCols + kGap], weights[kRows][kKeys + kGap];
  };
  // The tiles, and the queries behind them.
  static constexpr int kPersistentBlocksPerSm = 0;
  static constexpr bool kWarpgroups = false;
  static void choose_schedule(PrefillGrid&, const P&) {}
  static size_t shared_bytes(const AttentionShape& shape) {
    return sizeof(Tiles) + size_t(kRows) * size_t(shape.dim + kGap) * 4;
  }

  static __device__ __forceinline__ void run(const Params& params) {
    extern __shared__ __align__(16) float floats_memory[];
    __shared__ PrefillRows kept;
    const PrefillRows rows = params.grid.template rows<SimtPrefillBody>(params.problem, kept);
    if (rows.count == 0) return;
    ConsumerLoop attending(params.problem, rows, *reinterpret_cast<Tiles*>(floats_memory),
                           floats_memory + sizeof(Tiles) / 4);
    attending.load_all_queries();
    const SeenKeys& all = attending.all;
    // Key tiles begin at multiples of their size, as in prefill.cuh.
    const unsigned last = unsigned(all.any_end);
    for (unsigned first = lesser(all.any_begin, all.any_end) / kKeys * kKeys; first < last; first += kKeys) {
      float logits[2][2] = {};
      attending.multiply_keys(int(first), logits);
      attending.weigh(int(first), logits);
      __syncwarp();
      attending.add_values();
    }
    attending.finish();
  }

 private:
  // The loop of a block over the keys that its rows see: what a thread holds of its half-warp's two rows.
  struct ConsumerLoop {
    const P& p;
    const PrefillRows& rows;
    Tiles& tiles;
    float* const queries;
    const int dim = int(p.shape.dim), pitch = dim + kGap, lane = threadIdx.x % 16;
    const int64_t first_col = int64_t(rows.part) * kCols;
    const int cols = int(lesser<int64_t>(kCols, p.shape.value_dim() - first_col));
    const SeenKeys all = join_lanes(seen_by(rows, threadIdx.x % 32, keys_seen(p, rows, threadIdx.x % 32)));
    int mine[2];
    RowKeys seen[2];
    ScoreAt at[2];
    SoftmaxState<float> states[2];
    float outputs[2][2][4] = {};

    __device__ __forceinline__ ConsumerLoop(const P& problem, const PrefillRows& block_rows, Tiles& memory,
                                            float* query_memory)
        : p(problem), rows(block_rows), tiles(memory), queries(query_memory) {
      KERNELS_UNROLL
      for (int a = 0; a < 2; ++a) {
        mine[a] = threadIdx.x / 16 + a * 16;
        const auto place = rows.query_head(mine[a]);
        at[a] = {rows.b, place.head, place.query, 0, rows.queries, rows.keys};
        seen[a] = keys_seen(p, rows, mine[a]);
      }
    }

    // Rows and columns that do not exist are zeros.
    __device__ __forceinline__ void load_all_queries() {
      for (int i = threadIdx.x; i < kRows * (dim / 4); i += max_threads) {
        const int row = i / (dim / 4), col = i % (dim / 4) * 4;
        load(
            queries + row * pitch + col, row < rows.count, [&]() -> const typename P::Q& { return p.q; },
            rows.token + rows.query_head(row).query, int64_t(rows.query_head(row).head) * dim + col, p.wide_queries);
      }
    }

    // Logits of the key tile at `pos`, kStep columns at a time. The values are copied along with the first columns of
    // the keys.
    __device__ __forceinline__ void multiply_keys(int pos, float (&sums)[2][2]) {
      const int key_row = threadIdx.x / 8, column = threadIdx.x % 8 * 4;  // of the chunk that this thread copies
      const bool there = key_row >= all.any_begin - pos && key_row < all.any_end - pos;
      for (int col = 0; col < dim; col += kStep) {
        __syncthreads();
        load(
            &tiles.keys[key_row][column], there && col + column < dim,
            [&] { return cached(p.kv.key(rows.b, rows.kv_head, pos + key_row).codes); }, 0, col + column, p.wide_keys);
        if (col == 0) {
          for (int i = column; i < kCols; i += 32) {
            load(
                &tiles.values[key_row][i], there && i < cols,
                [&] { return cached(p.kv.value(rows.b, rows.kv_head, pos + key_row).codes); }, 0, first_col + i,
                p.wide_values);
          }
        }
        __syncthreads();
        const int steps = lesser(kStep, dim - col);
        for (int i = 0; i < steps; i += 4) {
          KERNELS_UNROLL
          for (int a = 0; a < 2; ++a) {
            KERNELS_UNROLL
            for (int b = 0; b < 2; ++b)
              sums[a][b] = dot4(queries + mine[a] * pitch + col + i, &tiles.keys[lane + b * 16][i], sums[a][b]);
          }
        }
      }
    }

    // Products become logits and then weights, which go to shared memory.
    __device__ __forceinline__ void weigh(int pos, const float (&sums)[2][2]) {
      KERNELS_UNROLL
      for (int a = 0; a < 2; ++a) {
        Pack<float, 2> logits;
        KERNELS_UNROLL
        for (int b = 0; b < 2; ++b) {
          at[a].key = int64_t(pos) + lane + b * 16;
          logits.v[b] = -infinity<float>();
          if (at[a].key >= seen[a].begin && at[a].key < seen[a].end && key_visible(p.score, at[a])) {
            float logit = sums[a][b] * p.scale;
            if constexpr (Key::scaled) logit *= p.kv.key(rows.b, rows.kv_head, at[a].key).scale(0);
            logits.v[b] = transform_logits(p.score, Pack<float, 1>{{logit}}, at[a]).v[0];
          }
        }
        const float factor = states[a].raise(of_row(max_of(logits), [](float x, float y) { return greater(x, y); })),
                    from = states[a].reference();
        Pack<float, 2> w = exp_minus(logits, from);
        states[a].l += of_row(sum(w), [](float x, float y) { return x + y; });
        KERNELS_UNROLL
        for (int b = 0; b < 2; ++b) {
          const int64_t key = int64_t(pos) + lane + b * 16;
          if constexpr (Value::scaled)
            w.v[b] = key >= all.any_begin && key < all.any_end ? w.v[b] * p.kv.value(rows.b, rows.kv_head, key).scale(0)
                                                               : 0.f;
          tiles.weights[mine[a]][lane + b * 16] = w.v[b];
        }
        KERNELS_UNROLL
        for (int i = 0; i < 8; ++i) outputs[a][i / 4][i % 4] *= factor;
      }
    }

    __device__ __forceinline__ void add_values() {
      for (int key = 0; key < kKeys; ++key) {
        KERNELS_UNROLL
        for (int half = 0; half < 2; ++half) {
          const ::float4 v = *reinterpret_cast<const ::float4*>(&tiles.values[key][half * 64 + lane * 4]);
          KERNELS_UNROLL
          for (int a = 0; a < 2; ++a) {
            const float w = tiles.weights[mine[a]][key];
            float (&o)[4] = outputs[a][half];
            o[0] = fma(w, v.x, o[0]), o[1] = fma(w, v.y, o[1]), o[2] = fma(w, v.z, o[2]), o[3] = fma(w, v.w, o[3]);
          }
        }
      }
    }

    __device__ __forceinline__ void finish() {
      KERNELS_UNROLL
      for (int a = 0; a < 2; ++a) {
        if (mine[a] >= rows.count) continue;
        const int64_t row = rows.token + at[a].query;
        float factor = 1.f;
        if (is_split<P>(rows)) {
          if (lane == 0 && rows.part == 0) store_partial_state(p, rows, mine[a], states[a].logsumexp());
        } else {
          if constexpr (score_sinks<S>) factor = states[a].merge(sink_state(p.score, at[a].head)).mine;
          if (lane == 0 && rows.part == 0) p.options.write_lse(states[a].logsumexp(), row, at[a].head, p.shape.heads);
        }
        factor *= states[a].inverse();
        KERNELS_UNROLL
        for (int half = 0; half < 2; ++half) {
          const int col = half * 64 + lane * 4;
          if (col < cols) put_outputs(a, row, col, outputs[a][half], factor);
        }
      }
    }
    __device__ __forceinline__ void put_outputs(int a, int64_t row, int col, const float (&from)[4], float factor) {
      Pack<float, 4> o;
      KERNELS_UNROLL
      for (int i = 0; i < 4; ++i) o.v[i] = from[i] * factor;
      if (is_split<P>(rows)) return store_partial_outputs(p, rows, mine[a], o, first_col + col);
      const auto map = sink_map(p.out);
      in_packs(lesser(4, p.out_pack), o, at[a].head * p.shape.value_dim() + first_col + col,
               [&](const auto& some, int64_t to) { put_mapped(sink_end(p.out), map, some, row, to); });
    }
  };

  // Copies four columns of source().
  template <class Source>
  static __device__ __forceinline__ void load(float* to, bool is_there, const Source& source, int64_t row, int64_t col,
                                              bool wide) {
    load_rows<float, 4, 1, 1, true, std::decay_t<decltype(source())>>(
        [&](int, const auto& there, const auto& missing) {
          if (is_there)
            there(source(), row, col, to);
          else
            missing(to);
        },
        wide);
  }
  static __device__ __forceinline__ float dot4(const float* a, const float* b, float sum) {
    const ::float4 x = *reinterpret_cast<const ::float4*>(a), y = *reinterpret_cast<const ::float4*>(b);
    return fma(x.w, y.w, fma(x.z, y.z, fma(x.y, y.y, fma(x.x, y.x, sum))));
  }
  // Reduces over the 16 lanes of a row.
  template <class F>
  static __device__ __forceinline__ float of_row(float x, const F& f) {
    KERNELS_UNROLL
    for (int mask = 8; mask > 0; mask /= 2) x = f(x, __shfl_xor_sync(0xffffffffu, x, mask));
    return x;
  }
};

}  // namespace detail
KERNELS_END
