// Decoding on CUDA cores, in float throughout, from keys and values of any type and alignment that are read through
// their functors.
//
//   logits:   lanes 0-3: keys 0, 8 | lanes 4-7: keys 1, 9 | ...    four lanes share a key and take its columns in turns
//   output:   lane 0: columns 0-3 | lane 1: 4-7 | ...              each lane has its own columns of the values
//
// Queries and weights are exchanged in shared memory. The kernel around it is in flash_decode.cuh.
#pragma once

#include "../../core/attention_plan.h"
#include "flash_decode.cuh"

KERNELS_BEGIN
namespace detail {

// N values of a source, in accesses of kWide elements or the widest that it allows.
template <int N, int kWide, class S>
__device__ __forceinline__ Pack<float, N> read_some(const S& source, int64_t row, int64_t col) {
  constexpr int most = kWide < N ? kWide : N, width = most < wide_pack<S> ? most : wide_pack<S>;
  Pack<float, N> out;
  KERNELS_UNROLL
  for (int i = 0; i < N; i += width) {
    const auto some = convert<float>(resolve(source, fetch<width>(source, row, col + i), row, col + i));
    KERNELS_UNROLL
    for (int j = 0; j < width; ++j) out.v[i + j] = some.v[j];
  }
  return out;
}

// Eight rows; values of up to 128 * kChunks columns.
template <class P, int kChunks>
class PlainRows {
 public:
  static constexpr int warps = 4, rows = 8, registers = 255;
  static constexpr bool fills_shared = false, short_of_registers = false;
  using Schedule = DecodeSchedule<P, warps * kDecodeKeys>;
  using Steps = WarpKeys<warps, 1>;
  using Cursor = typename Schedule::Cursor;
  using Key = KeyRun<typename P::Kv>;
  using Value = ValueRun<typename P::Kv>;
  // Elements per access, if the view allows wide ones.
  static constexpr int key_pack = wide_pack<typename Key::Codes>,
                       value_pack = wide_pack<typename Value::Codes> < 4 ? wide_pack<typename Value::Codes> : 4;
  static void describe(const P& p, AttentionPlan& plan) {
    plan.tile_dim = kMostDim, plan.tile_v_dim = 128 * kChunks;
    plan.query_pack = 1, plan.key_pack = p.wide_kv ? key_pack : 1, plan.value_pack = p.wide_kv ? value_pack : 1;
  }
  static size_t shared_bytes(const P& p) {
    return sizeof(float) * (rows * p.dim + warps * (kDecodeKeys * rows + rows * (p.v_dim + 4)));
  }

  __device__ __forceinline__ PlainRows(const P& p, unsigned char* shared, const Cursor&)
      : p_(p),
        queries_(reinterpret_cast<float*>(shared)),
        shares_(queries_ + rows * p.dim + warp() * kDecodeKeys * rows),
        all_sums_(queries_ + rows * p.dim + warps * kDecodeKeys * rows) {}

  __device__ __forceinline__ void prefetch(const DecodePart&) {}
  static constexpr bool fills_early = false;
  __device__ __forceinline__ void fill(int) {}
  __device__ __forceinline__ void begin(const DecodePart& part) {
    weights_.begin(p_, part);
    KERNELS_UNROLL
    for (int row = 0; row < rows; ++row) {
      KERNELS_UNROLL
      for (int chunk = 0; chunk < kChunks; ++chunk) sums_[row][chunk] = broadcast<4>(0.f);
    }
    for (int i = threadIdx.x; i < rows * p_.dim; i += warps * 32) {
      const int row = int(unsigned(i) / unsigned(p_.dim)), col = i - row * p_.dim;
      const int number = part.tile * rows + row, query = p_.query_of(number);
      const int64_t token = p_.shape.first_query(part.b) + query;
      const int64_t at = (int64_t(part.head) * p_.group + (number - query * p_.group)) * p_.dim + col;
      queries_[i] = row < part.rows ? resolve(p_.q, fetch<1>(p_.q, token, at), token, at).v[0] : 0.f;
    }
    __syncthreads();
  }

  __device__ __forceinline__ void take(const DecodePart& part, uint32_t key, uint32_t count) {
    const Reader read{p_.wide_kv};
    const Place place{int(key), int(count) - 1};
    const int g = lane() / 4;
    const Key low = p_.kv.key(part.b, part.head, place(g)), high = p_.kv.key(part.b, part.head, place(g + 8));
    Products products = {};
    multiply_keys(read, low, high, products);
    float x[1][4];
    sum_products(low, high, products, x);
    weights_.weigh(p_, part, x, key, count, [&](const typename Weights::Factors& factors) { scale_sums(factors); });
    share_weights(part, place, x);
    __syncwarp();
    add_values(read, part, place, int(count));
    __syncwarp();
  }

  __device__ __forceinline__ void end_keys(bool) {}
  __device__ __forceinline__ void write_states(float2* states) { weights_.write(states); }
  template <class States>
  __device__ __forceinline__ void write_sums(int, const States& states) {
    const float factors[2] = {weights_.factor(states, 0, 0), weights_.factor(states, 0, 1)};
    KERNELS_UNROLL
    for (int row = 0; row < rows; ++row) {
      const float factor = __shfl_sync(0xffffffffu, factors[row % 2], row / 2);
      KERNELS_UNROLL
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        const int col = column(chunk);
        const Pack<float, 4> sums = sums_[row][chunk] * factor;
        if (col < p_.v_dim) put_floats(sums_at(warp()) + row * (p_.v_dim + 4) + col, sums);
      }
    }
  }
  __device__ __forceinline__ Pack<float, 4> sums_of(int warp, int row, int col) const {
    return floats_at<4>(sums_at(warp) + row * (p_.v_dim + 4) + col);
  }

 private:
  using Weights = DecodeWeights<P, 1>;

  static __device__ __forceinline__ int lane() { return threadIdx.x & 31; }
  static __device__ __forceinline__ int warp() { return threadIdx.x / 32; }
  static __device__ __forceinline__ int column(int chunk) { return chunk * 128 + lane() * 4; }
  __device__ __forceinline__ float* sums_at(int warp) const { return all_sums_ + warp * rows * (p_.v_dim + 4); }

  // The position of key i of the warp's keys; the last one for keys that do not exist.
  struct Place {
    int first, most;
    __device__ __forceinline__ int operator()(int i) const { return first + lesser(i, most); }
  };
  using Products = float[2][rows];

  // Runs all loads of a step in one branch, so that all are issued before the first value is used.
  struct Reader {
    bool wide;
    template <class All>
    __device__ __forceinline__ void operator()(const All& all) const {
      if (wide) all(std::integral_constant<int, 8>());
      else all(std::integral_constant<int, 1>());
    }
  };

  // Products of all rows with the lane's two keys, over the lane's columns.
  __device__ __forceinline__ void multiply_keys(const Reader& read, const Key& low, const Key& high,
                                                Products& products) const {
    const int t = lane() % 4;
    for (int col = t * 8; col < p_.dim; col += 32) {
      Pack<float, 8> k0, k1;
      read([&](auto most) {
        k0 = read_some<8, decltype(most)::value>(low.codes, 0, col);
        k1 = read_some<8, decltype(most)::value>(high.codes, 0, col);
      });
      KERNELS_UNROLL
      for (int row = 0; row < rows; ++row) {
        const Pack<float, 8> q = floats_at<8>(queries_ + row * p_.dim + col);
        KERNELS_UNROLL
        for (int i = 0; i < 8; ++i) {
          products[0][row] = fma(q.v[i], k0.v[i], products[0][row]);
          products[1][row] = fma(q.v[i], k1.v[i], products[1][row]);
        }
      }
    }
  }
  // Sums over the columns of all four lanes. Each lane keeps those of its two rows.
  static __device__ __forceinline__ void sum_products(const Key& low, const Key& high, Products& products,
                                                      float (&x)[1][4]) {
    const int t = lane() % 4;
    KERNELS_UNROLL
    for (int i = 0; i < 2; ++i) {
      const float scale = i == 0 ? low.scale(0) : high.scale(0);
      KERNELS_UNROLL
      for (int row = 0; row < rows; ++row) {
        products[i][row] += __shfl_xor_sync(0xffffffffu, products[i][row], 1);
        products[i][row] += __shfl_xor_sync(0xffffffffu, products[i][row], 2);
        if (row / 2 == t) x[0][i * 2 + row % 2] = products[i][row] * scale;
      }
    }
  }
  __device__ __forceinline__ void scale_sums(const typename Weights::Factors& factors) {
    KERNELS_UNROLL
    for (int row = 0; row < rows; ++row) {
      const float factor = __shfl_sync(0xffffffffu, factors[0][row % 2], row / 2);
      KERNELS_UNROLL
      for (int chunk = 0; chunk < kChunks; ++chunk) sums_[row][chunk] = sums_[row][chunk] * factor;
    }
  }
  // Writes weights, multiplied by the scales of the values, to shared memory.
  __device__ __forceinline__ void share_weights(const DecodePart& part, const Place& place,
                                                const float (&x)[1][4]) const {
    const int g = lane() / 4, t = lane() % 4;
    KERNELS_UNROLL
    for (int i = 0; i < 2; ++i) {
      const float scale = Value::scaled ? p_.kv.value(part.b, part.head, place(g + 8 * i)).scale(0) : 1.f;
      *reinterpret_cast<float2*>(shares_ + (g + 8 * i) * rows + 2 * t) =
          make_float2(x[0][2 * i] * scale, x[0][2 * i + 1] * scale);
    }
  }
  // Adds the values of `count` keys, multiplied by the weights in shared memory.
  __device__ __forceinline__ void add_values(const Reader& read, const DecodePart& part, const Place& place,
                                             int count) {
    constexpr int kUnroll = kChunks > 1 ? 2 : 4;
    for (int first = 0; first < count; first += kUnroll) {
      Pack<float, 4> values[kUnroll][kChunks];
      read([&](auto most) {
        KERNELS_UNROLL
        for (int i = 0; i < kUnroll; ++i) {
          const Value run = p_.kv.value(part.b, part.head, place(first + i));
          KERNELS_UNROLL
          for (int chunk = 0; chunk < kChunks; ++chunk) {
            values[i][chunk] = broadcast<4>(0.f);
            if (column(chunk) < p_.v_dim && first + i < count)
              values[i][chunk] = read_some<4, decltype(most)::value>(run.codes, 0, column(chunk));
          }
        }
      });
      KERNELS_UNROLL
      for (int i = 0; i < kUnroll; ++i) {
        const Pack<float, rows> share = floats_at<rows>(shares_ + (first + i) * rows);
        KERNELS_UNROLL
        for (int row = 0; row < rows; ++row) {
          KERNELS_UNROLL
          for (int chunk = 0; chunk < kChunks; ++chunk) {
            KERNELS_UNROLL
            for (int j = 0; j < 4; ++j)
              sums_[row][chunk].v[j] = fma(share.v[row], values[i][chunk].v[j], sums_[row][chunk].v[j]);
          }
        }
      }
    }
  }

  const P& p_;
  float *queries_, *shares_, *all_sums_;  // of the block, of the warp, of the block
  Weights weights_;
  Pack<float, 4> sums_[rows][kChunks];
};

}  // namespace detail
KERNELS_END
