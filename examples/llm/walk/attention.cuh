// Attention of one token in walk.cu: split-KV over blocks, and over the warps of a block.
#pragma once

#include "walk/thread.cuh"

namespace llm {
namespace {

struct AttendingThread : Thread {
  using Thread::Thread;

  // The block's part of a layer's attention, on tensor cores. A warp takes 16 keys at a time:
  //
  //     logits  A: keys, 16 bytes of a row for a lane
  //             B: queries; columns 0 to 3 are heads, 4 to 7 their residuals (the rounded rest)
  //             C: lane 4g + t has keys g and g + 8 of heads 2t and 2t + 1
  //     sums    A: softmax weights, transposed
  //             B: values, transposed; 8 columns of a lane are in 4 tiles
  //             C: lane 4g + t has head g, columns 8t + 2j and 8t + 2j + 1 in tile j
  //
  // If keys are split, all blocks of a set of heads combine the partial results, each of them some columns.
  template <int kChunks>  // a head has this many chunks of 32 columns
  __device__ __forceinline__ void attend(const WalkLayer& layer, const Part& part) {
    begin_part();
    constexpr int dim = 32 * kChunks, pitch = kShared * (dim + 2);
    const int nq = int(w.shape.heads) * dim, nk = int(w.shape.kv_heads) * dim;
    const int end = part.end, kv_head = part.kv_head;
    const auto* const all_keys =
        reinterpret_cast<const ::uint4*>(static_cast<const A*>(layer.keys) + kv_head * dim) + t;
    const auto* const all_values =
        reinterpret_cast<const ::uint4*>(static_cast<const A*>(layer.values) + kv_head * dim) + t;
    // In shared memory: rounded queries, their residuals, the newest key and value, and the states of the warps.
    A* const queries = reinterpret_cast<A*>(inputs);
    A* const newest_rows = queries + 2 * kShared * dim;
    float* const mine = reinterpret_cast<float*>(inputs + kStatesAt);

    int pos = part.begin + warp * 16 + g;  // this lane's keys: pos and pos + 8
    int places[2];                         // where they lie, in units of 16 bytes; -1: no key
    ::uint4 key[2][kChunks], value[2][kChunks];
    const auto find = [&] {
      KERNELS_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int at_key = pos + 8 * half;
        places[half] = at_key < end && at_key != newest ? slot_of(p, at_key) * (nk / 8) : -1;
      }
    };
    const auto read = [&](::uint4(&to)[2][kChunks], const ::uint4* from) {
      KERNELS_UNROLL
      for (int half = 0; half < 2; ++half) {
        KERNELS_UNROLL
        for (int c = 0; c < kChunks; ++c) {
          to[half][c] = {0, 0, 0, 0};
          // Evicted first, since the L2 holds prefetched weights. After 16,000 keys on an H100, Llama-3.2-1B makes 833
          // tokens/s with this and 811 without, and Mistral-7B 173.7 and 167.1.
          if (places[half] >= 0) to[half][c] = __ldcs(from + places[half] + 4 * c);
        }
      }
    };
    const auto put_newest = [&](::uint4(&to)[2][kChunks], const A* from) {
      KERNELS_UNROLL
      for (int half = 0; half < 2; ++half) {
        if (pos + 8 * half != newest || newest >= end) continue;
        KERNELS_UNROLL
        for (int c = 0; c < kChunks; ++c) to[half][c] = *reinterpret_cast<const ::uint4*>(from + 32 * c + 8 * t);
      }
    };
    // All but the newest key were there before this launch.
    find();
    read(key, all_keys);
    read(value, all_values);

    // Queries, and the newest key and value: dim / 4 threads have a row, each of them two pairs of columns.
    constexpr int kEachRow = dim / 4;
    static_assert((kShared + 2) * kEachRow <= kThreads, "one row for some threads");
    const int row = tid / kEachRow, column = tid % kEachRow * 2;  // the other pair of columns is half a head further
    const bool query = row < kShared, there = row < kShared + 2;
    const float* const gamma = query ? layer.q_norm : layer.k_norm;
    float gammas[2][2] = {};
    KERNELS_UNROLL
    for (int i = 0; i < 2; ++i) {
      if (w.head_norms && there) arch::begin_load(gammas[i], gamma + column + i * dim / 2);
    }
    Word words[2][2];
    const int from =
        query ? (part.first_head + min(row, part.heads - 1)) * dim : nq + (row - kShared) * nk + kv_head * dim;
    await(words, there ? 2 : 0, [&](int i) { return room.qkv + from + column + i * dim / 2; });
    float x[2][2];
    KERNELS_UNROLL
    for (int i = 0; i < 4; ++i) x[i / 2][i % 2] = this->value(words[i / 2][i % 2]);
    if (w.head_norms) normalize_head<kEachRow>(layer, x, gammas, column, row <= kShared);
    if (there) {
      const float factor = query ? w.score_scale * 1.44269504f : 1.f;
      A* const to = query ? queries + row * dim : newest_rows + (row - kShared) * dim;
      // Other blocks have the newest key, too; one block alone writes it to the cache.
      const bool keeps = w.head_norms && row == kShared && part.first_head % (w.shape.heads / w.shape.kv_heads) == 0 &&
                         newest >= part.begin && newest < end;
      KERNELS_UNROLL
      for (int i = 0; i < 2; ++i) {
        const float a = x[i][0] * factor, b = x[i][1] * factor;
        const uint32_t pair = k::detail::rounded_pair<A>(a, b);
        const int at_column = column + i * dim / 2;
        *reinterpret_cast<uint32_t*>(to + at_column) = pair;
        if (query)
          *reinterpret_cast<uint32_t*>(to + kShared * dim + at_column) = k::detail::rest_of_pair<A>(a, b, pair);
        if (keeps) {
          A* const kept = static_cast<A*>(layer.keys) + int64_t(slot_of(p, newest)) * nk + kv_head * dim + at_column;
          *reinterpret_cast<uint32_t*>(kept) = pair;
        }
      }
    }
    sync();
    ::uint4 q[kChunks];
    KERNELS_UNROLL
    for (int c = 0; c < kChunks; ++c) q[c] = *reinterpret_cast<const ::uint4*>(queries + g * dim + 32 * c + 8 * t);

    float sums[4 * kChunks][4] = {}, largest[2] = {-1e30f, -1e30f}, weight[2] = {};  // of heads 2t and 2t + 1
#pragma unroll 1
    for (int first = part.begin; first < end; first += kKeysAtOnce) {
      put_newest(key, newest_rows);
      put_newest(value, newest_rows + dim);
      const bool there[2] = {pos < end, pos + 8 < end};
      float some[2][4] = {};
      KERNELS_UNROLL
      for (int c = 0; c < kChunks; ++c) {
        const uint32_t a0[4] = {key[0][c].x, key[1][c].x, key[0][c].y, key[1][c].y}, b0[2] = {q[c].x, q[c].y};
        const uint32_t a1[4] = {key[0][c].z, key[1][c].z, key[0][c].w, key[1][c].w}, b1[2] = {q[c].z, q[c].w};
        arch::mma_16816<A>(some[0], a0, b0);
        arch::mma_16816<A>(some[1], a1, b1);
      }
      pos += kKeysAtOnce;
      find();
      read(key, all_keys);
      float logits[2][2], fade[2];
      KERNELS_UNROLL
      for (int i = 0; i < 4; ++i) {
        const float sum = some[0][i] + some[1][i], both = sum + __shfl_xor_sync(0xffffffffu, sum, 2);
        logits[i / 2][i % 2] = there[i / 2] ? both : -1e30f;
      }
      uint32_t weights[4] = {};
      KERNELS_UNROLL
      for (int h = 0; h < 2; ++h) {
        float top = fmaxf(logits[0][h], logits[1][h]);
        KERNELS_UNROLL
        for (int distance = 4; distance < 32; distance *= 2)
          top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, distance));
        top = fmaxf(top, largest[h]);
        fade[h] = exp2f(largest[h] - top), largest[h] = top;
        KERNELS_UNROLL
        for (int half = 0; half < 2; ++half) logits[half][h] = there[half] ? exp2f(logits[half][h] - top) : 0.f;
        weight[h] = weight[h] * fade[h] + (logits[0][h] + logits[1][h]);
      }
      KERNELS_UNROLL
      for (int half = 0; half < 2; ++half) {
        const uint32_t pair = k::detail::rounded_pair<A>(logits[half][0], logits[half][1]);
        weights[2 * half] = arch::transpose_matrix(t < 2 ? pair : 0);
      }
      const float even = __shfl_sync(0xffffffffu, fade[0], g / 2), odd = __shfl_sync(0xffffffffu, fade[1], g / 2);
      const float mine_fades = g % 2 == 0 ? even : odd;
      KERNELS_UNROLL
      for (int c = 0; c < kChunks; ++c) {
        const uint32_t upper[4] = {value[0][c].x, value[0][c].y, value[0][c].z, value[0][c].w};
        const uint32_t lower[4] = {value[1][c].x, value[1][c].y, value[1][c].z, value[1][c].w};
        KERNELS_UNROLL
        for (int j = 0; j < 4; ++j) {
          float(&to)[4] = sums[4 * c + j];
          to[0] *= mine_fades, to[1] *= mine_fades;
          const uint32_t b[2] = {arch::transpose_matrix(upper[j]), arch::transpose_matrix(lower[j])};
          arch::mma_16816<A>(to, weights, b);
        }
      }
      read(value, all_values);
    }
    // Each warp stores its state to shared memory.
    KERNELS_UNROLL
    for (int h = 0; h < 2; ++h) {
      KERNELS_UNROLL
      for (int distance = 4; distance < 32; distance *= 2)
        weight[h] += __shfl_xor_sync(0xffffffffu, weight[h], distance);
    }
    if (g < kShared) {
      float* const to = mine + warp * pitch + g * (dim + 2) + 8 * t;
      KERNELS_UNROLL
      for (int i = 0; i < 4 * kChunks; ++i)
        *reinterpret_cast<float2*>(to + i / 4 * 32 + i % 4 * 2) = {sums[i][0], sums[i][1]};
    }
    if (g == 0 && t < 2) {
      KERNELS_UNROLL
      for (int h = 0; h < 2; ++h)
        *reinterpret_cast<float2*>(mine + warp * pitch + (2 * t + h) * (dim + 2) + dim) = {largest[h], weight[h]};
    }
    sync();
    // A thread joins the states of all warps for two columns of a head. That is the result if keys are not split;
    // otherwise it goes to global memory as that of a part.
    constexpr int half = dim / 2;
    const int parts = part.count, head = part.first_head, pairs = part.heads * half;
#pragma unroll 1
    for (int i = tid; i < pairs; i += kThreads) {
      const State2 s = joined(mine + i / half * (dim + 2), i % half * 2, pitch, dim);
      if (parts == 1) {
        put_column(head + i / half, i % half, s);
      } else {
        Word* const to = room.states + int64_t(part.set * parts + part.number) * pitch + i / half * (dim + 2);
        arch::store_words(to + i % half * 2, word(s.sum.x, tag), word(s.sum.y, tag));
        if (i % half == 0) arch::store_words(to + dim, word(s.largest, tag), word(s.weight, tag));
      }
    }
    if (parts > 1) {
      const Word* const states = room.states + int64_t(part.set) * parts * pitch;
      const int mine_of_pairs = (pairs + parts - 1) / parts, first_pair = part.number * mine_of_pairs;
      for (int i = first_pair + tid / 16; i < min(pairs, first_pair + mine_of_pairs); i += kThreads / 16) {
        // 16 lanes read the parts of two columns.
        State2 s = {{0, 0}, -1e30f, 0};
        const unsigned lanes_here = 0xffffu << (lane & 16);
        for (int from = lane % 16; from < parts; from += 16) {
          const Word* const at_part = states + from * pitch + i / half * (dim + 2);
          Word words[2][2];
          await(words, 2, [&](int j) { return at_part + (j == 0 ? i % half * 2 : dim); });
          s = s.with({{this->value(words[0][0]), this->value(words[0][1])},
                      this->value(words[1][0]),
                      this->value(words[1][1])});
        }
        __syncwarp(lanes_here);
        for (int distance = 8; distance > 0; distance /= 2)
          s = s.with({{__shfl_xor_sync(lanes_here, s.sum.x, distance), __shfl_xor_sync(lanes_here, s.sum.y, distance)},
                      __shfl_xor_sync(lanes_here, s.largest, distance),
                      __shfl_xor_sync(lanes_here, s.weight, distance)});
        if (lane % 16 == 0) put_column(head + i / half, i % half, s);
      }
    }
    sync();  // before there are other inputs
  }

  // Normalizes a head, and rotates it by the angles of the token's position. A lane has two times two columns, half a
  // head apart.
  template <int kLanes>
  __device__ __forceinline__ void normalize_head(const WalkLayer& layer, float (&x)[2][2], const float (&gammas)[2][2],
                                                 int column, bool it_is_one) const {
    float squares = x[0][0] * x[0][0] + x[0][1] * x[0][1] + x[1][0] * x[1][0] + x[1][1] * x[1][1];
    KERNELS_UNROLL
    for (int distance = kLanes / 2; distance > 0; distance /= 2)
      squares += __shfl_xor_sync(0xffffffffu, squares, distance);
    const float factor = rsqrtf(squares / float(4 * kLanes) + w.eps);
    if (!it_is_one) return;
    KERNELS_UNROLL
    for (int j = 0; j < 2; ++j) {
      const float a = x[0][j] * factor * gammas[0][j], b = x[1][j] * factor * gammas[1][j];
      const float c = shared.cosines[layer.rope][column + j], s = shared.sines[layer.rope][column + j];
      x[0][j] = a * c - b * s, x[1][j] = b * c + a * s;
    }
  }

  // The state of two columns of a head for some of the keys.
  struct State2 {
    float2 sum;
    float largest, weight;
    __device__ __forceinline__ State2 with(const State2& other) const {
      const float top = fmaxf(largest, other.largest), mine = exp2f(largest - top), its = exp2f(other.largest - top);
      return {{sum.x * mine + other.sum.x * its, sum.y * mine + other.sum.y * its},
              top,
              weight * mine + other.weight * its};
    }
  };
  // The state of all warps together.
  static __device__ __forceinline__ State2 joined(const float* states, int col, int pitch, int dim) {
    float2 sums[kWarps], rest[kWarps];
    float top = -1e30f;
    KERNELS_UNROLL
    for (int i = 0; i < kWarps; ++i) {
      sums[i] = *reinterpret_cast<const float2*>(states + i * pitch + col);
      rest[i] = *reinterpret_cast<const float2*>(states + i * pitch + dim);
      top = fmaxf(top, rest[i].x);
    }
    State2 s = {{0, 0}, top, 0};
    KERNELS_UNROLL
    for (int i = 0; i < kWarps; ++i) {
      const float its = exp2f(rest[i].x - top);
      s.sum.x += sums[i].x * its, s.sum.y += sums[i].y * its, s.weight += rest[i].y * its;
    }
    return s;
  }
  __device__ __forceinline__ void put_column(int head, int pair, const State2& s) const {
    arch::store_word(
        room.o + head * int(w.shape.dim) / 2 + pair,
        word(k::detail::rounded_pair<A>(__fdividef(s.sum.x, s.weight), __fdividef(s.sum.y, s.weight)), tag + 1));
  }
};

}  // namespace
}  // namespace llm
