// The producer of walk.cu: a warp that copies the rows of all products, one after the other, into the stages of a ring.
#pragma once

#include "walk_parts.cuh"

namespace llm {
namespace {

struct RingPlace {
  int stage = 0, parity = 0;
  __device__ __forceinline__ void next(int stages) {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
};

struct Producer {
  Shared& shared;
  uint32_t ring;
  int stages;
  uint64_t policy;
  RingPlace at, landing, half;  // half: half of the ring ahead
  int in_flight = 0;

  __device__ __forceinline__ void stream(const Walk& w, const Step& step) {
    const int lane = threadIdx.x & 31, bytes = int(row_bytes(step.cols)), tiles = (step.rows + kTile - 1) / kTile;
#pragma unroll 1
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      const Row row = row_of(w, step, tile * kTile + lane % kTile);
      const char* const from = static_cast<const char*>(lane < kTile ? row.codes : row.scales);
#pragma unroll 1
      for (int begin = 0; begin < bytes; begin += kChunk) {
        const int some = min(kChunk, bytes - begin);
        arch::mbarrier_wait_in_block(&shared.empty[at.stage], at.parity ^ 1);
        const bool ahead = __any_sync(0xffffffffu, !arch::mbarrier_is_past(&shared.empty[half.stage], half.parity ^ 1));
        for (++in_flight; in_flight > (ahead ? kInFlightAhead : kInFlight); --in_flight) {
          arch::mbarrier_wait_in_block(&shared.full[landing.stage], landing.parity);
          landing.next(stages);
        }
        if (lane == 0)
          arch::mbarrier_arrive_expect(&shared.full[at.stage], kTile * (some + (kGroupScales ? some / 8 : 0)));
        __syncwarp();
        const uint32_t to = ring + at.stage * kStage;
        if (lane < kTile) {
          arch::copy_bulk(to + lane * kPitch, from + begin, some, &shared.full[at.stage], policy);
        } else if constexpr (kGroupScales) {
          arch::copy_bulk(to + kTile * kPitch + (lane - kTile) * kScalePitch, from + begin / 8, some / 8,
                          &shared.full[at.stage], policy);
        }
        at.next(stages), half.next(stages);
      }
    }
  }

  // Keys and values that this block will read, but the newest, into the L2.
  __device__ __forceinline__ void prefetch_keys(const Params& p, const WalkLayer& layer, int keys) const {
    const Part part(p, layer, keys);
    const int dim = int(p.walk.shape.dim), lines = (2 * dim + 127) / 128, lane = threadIdx.x & 31;
    const int count = (min(part.end, keys - 1) - part.begin) * lines;
    for (int i = lane; i < min(count, 2048); i += 32) {
      const int64_t at =
          (int64_t(slot_of(p, part.begin + i / lines)) * p.walk.shape.kv_heads + part.kv_head) * dim + i % lines * 64;
      arch::prefetch_l2(static_cast<const A*>(layer.keys) + at);
      arch::prefetch_l2(static_cast<const A*>(layer.values) + at);
    }
  }

  __device__ __forceinline__ void run(const Params& p) {
    const Walk& w = p.walk;
    LayerOnItsWay next;
    next.fetch(w, 0);
    int keys = 0;
#pragma unroll 1
    for (int i = 0; i < Step::count(w); ++i) {
      WalkLayer& layer = shared.streamed[i / 4 % 2];
      if (i % 4 == 0) {
        next.put(layer);
        __syncwarp();
        next.fetch(w, i / 4 + 1);
        if (i == 4) {  // what is not constant is there when the kernel ahead has ended
          arch::grid_dependency_wait();
          keys = p.tokens.kept != nullptr ? p.tokens.kept[0] : p.tokens.lengths[0];
        }
        if (i > 0 && i < 4 * int(w.count)) prefetch_keys(p, layer, keys);
      }
      stream(w, Step(w, i, layer));
    }
  }
};

}  // namespace
}  // namespace llm
