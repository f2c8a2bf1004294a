// The producer of walk.cu: warps that copy the rows of all products, one after the other, into the stages of a ring. A
// stage takes two copies, or four with scales. Each is started by another warp, because starting a copy takes a thread
// about 70 ns on an H100; one warp for all of them is slower by 1 to 2 %. The last two warps also prefetch what else a
// layer needs.
#pragma once

#include "walk/parts.cuh"

namespace llm {
namespace {

struct PipelineState {
  int stage = 0, parity = 0;
  __device__ __forceinline__ void next(int stages) {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
};

class Producer {
 public:
  __device__ __forceinline__ Producer(const Params& params, Shared& s, uint32_t stages)
      : p(params),
        w(params.walk),
        shared(s),
        ring(stages),
        policy(arch::read_once_policy()),
        maps_(Room(params.walk, params.walk.room, gridDim.x).maps) {}

  __device__ __forceinline__ void run() {
    if (copier == kCopiers - 1) {
      next_.fetch(w, 0);
      next_.put(shared.streamed[0]);
      next_.fetch(w, 1);
    }
#pragma unroll 1
    for (int i = 0; i < Step::count(w); ++i) {
      if (i % 4 == 0) begin_layer(i / 4);
      if (copier >= 2 * kMaps) continue;  // without scales this warp has nothing to copy
      const Step step(p, i, shared.streamed[i / 4 % 3]);
      const int bytes = int(row_bytes(step.sizes.cols));
#pragma unroll 1
      for (int tile = step.first_tile(); tile < step.sizes.tiles; tile += int(gridDim.x)) {
        const Box box = box_of(step, i, tile);
#pragma unroll 1
        for (int begin = 0; begin < bytes; begin += kChunk) {
          wait_for_room({copied_, i, tile, begin});
          copy(box, begin);
        }
      }
    }
  }

 private:
  // A stage of this block's rows: its number, its product and tile, and its first byte within the rows.
  struct Place {
    int stage, step, tile, begin;
  };

  // A warp's part of a tile: one half of it, or the scales of a half.
  struct Box {
    const arch::TensorMap& map;
    int row;
  };
  __device__ __forceinline__ Box box_of(const Step& step, int number, int tile) const {
    const TileRows rows = rows_of(w, step, tile);
    const int which = is_second ? rows.of_second : rows.of_first;
    return {maps_[(number / 4 * kMatrices + which) * kMaps + has_scales], is_second ? rows.second : rows.first};
  }

  __device__ __forceinline__ void begin_layer(int layer) {
    if (copier == kCopiers - 1) {  // the other warps may still be in the layer before
      next_.put(shared.streamed[(layer + 1) % 3]);
      next_.fetch(w, layer + 2);
    }
    arch::named_barrier_sync(kAllCopiers, 32 * kCopiers);
    if (layer == 1) {  // the number of keys is not constant: it is there when the kernel before this one has ended
      arch::grid_dependency_wait();
      keys_ = p.tokens.kept != nullptr ? p.tokens.kept[0] : p.tokens.lengths[0];
    }
    if (copier == kCopiers - 1) prefetch_maps(layer);
    if (layer < w.count) prefetch_norms(shared.streamed[layer % 3]);
    if (layer > 0 && layer < w.count) prefetch_keys(shared.streamed[layer % 3]);
  }

  // Waits until the ring has room for the next stage. Meanwhile prefetches that stage and those after it, kAhead at
  // most, into the L2, so that memory is not idle while the ring is full. Prefetches are paced by the bandwidth of
  // memory, or what blocks send each other would wait behind them.
  __device__ __forceinline__ void wait_for_room(const Place& next) {
    uint64_t* const empty = &shared.empty[at_.stage];
    const int parity = at_.parity ^ 1;
    while (!__all_sync(0xffffffffu, arch::mbarrier_is_past(empty, parity))) {
      if (ahead_.stage < next.stage) ahead_ = next;
      if (ahead_.stage >= next.stage + kAhead || !find(ahead_) || ahead_.step / 4 > next.step / 4 + 1)
        return arch::mbarrier_wait_in_block(empty, parity);
      const unsigned now = __shfl_sync(0xffffffffu, unsigned(clock()), 0);  // the same for all lanes
      if (now - prefetched_at_ < p.pace) continue;
      prefetched_at_ = now;
      prefetch(ahead_);
    }
  }
  __device__ __forceinline__ void prefetch(Place& at) const {
    const Step step(p, at.step, shared.streamed[at.step / 4 % 3]);
    const Box box = box_of(step, at.step, at.tile);
    if (lane == 0)
      arch::prefetch_box(box.map, has_scales ? at.begin / 8 : 0, box.row, has_scales ? 0 : at.begin / 128, 0);
    ++at.stage, at.begin += kChunk;
  }
  // Moves a place beyond the end of a tile or product on to the next one. Returns false after the last.
  __device__ __forceinline__ bool find(Place& at) const {
    while (at.step < Step::count(w)) {
      const Step step(p, at.step, shared.streamed[0]);  // of any layer: all have the same sizes
      if (at.tile < 0) at.tile = step.first_tile();
      if (at.begin >= int(row_bytes(step.sizes.cols))) at.tile += int(gridDim.x), at.begin = 0;
      if (at.tile < step.sizes.tiles) return true;
      ++at.step, at.tile = -1, at.begin = 0;
    }
    return false;
  }

  __device__ __forceinline__ void copy(const Box& box, int begin) {
    const int most = shared.soon_waiting ? kFewInFlight : kInFlight;
    for (++in_flight_; in_flight_ > most; --in_flight_) {
      arch::mbarrier_wait_in_block(&shared.full[landing_.stage], landing_.parity);
      landing_.next(p.stages);
    }
    if (lane == 0) {
      uint64_t* const full = &shared.full[at_.stage];
      const int bytes = has_scales ? kHalf * kChunk / 8 : kHalf * kChunk;
      const uint32_t to = ring + at_.stage * kStage + (has_scales ? kScalesAt : 0) + is_second * bytes;
      arch::mbarrier_arrive_expect(full, bytes);
      arch::copy_box(to, box.map, has_scales ? begin / 8 : 0, box.row, has_scales ? 0 : begin / 128, 0, full, policy);
    }
    at_.next(p.stages), ++copied_;
  }

  // Prefetches the tensor maps of the next layer.
  __device__ __forceinline__ void prefetch_maps(int layer) const {
    if (lane != 0) return;
    const int from = (layer == 0 ? 0 : layer + 1) * kMatrices, head = int(w.count) * kMatrices;
    const int to = min((layer + 2) * kMatrices, head + (w.head.data != nullptr ? 1 : 0));
#pragma unroll 1
    for (int i = from * kMaps; i < to * kMaps; ++i) arch::prefetch_map(maps_[i]);
  }

  // Prefetches the factors of a layer's norms into the L2, each block another line: all blocks will need all at once.
  __device__ __forceinline__ void prefetch_norms(const WalkLayer& layer) const {
    if (copier != kCopiers - 2) return;
    for (int at = (int(blockIdx.x) + lane * int(gridDim.x)) * 32; at < int(w.hidden); at += 32 * 32 * int(gridDim.x)) {
      arch::prefetch_l2(layer.attention_norm + at);
      arch::prefetch_l2(layer.mlp_norm + at);
    }
  }

  // Prefetches keys and values that this block will read into the L2, except the newest: all of them if keys are not
  // split, and otherwise as many as have room there from all blocks.
  __device__ __forceinline__ void prefetch_keys(const WalkLayer& layer) const {
    if (copier < kCopiers - 2) return;
    const Part part(p, layer, keys_);
    const int dim = int(w.shape.dim), lines = (2 * dim + 127) / 128;
    const int count = (min(part.end, keys_ - 1) - part.begin) * lines;
    const int most = part.count == 1 ? count : min(count, kAheadKeys);
    for (int i = copier % 2 * 32 + lane; i < most; i += 64) {
      const int64_t at =
          (int64_t(slot_of(p, part.begin + i / lines)) * w.shape.kv_heads + part.kv_head) * dim + i % lines * 64;
      arch::prefetch_l2(static_cast<const A*>(layer.keys) + at);
      arch::prefetch_l2(static_cast<const A*>(layer.values) + at);
    }
  }

  const Params& p;
  const Walk& w;
  Shared& shared;
  const uint32_t ring;
  const uint64_t policy;
  const arch::TensorMap* const maps_;
  const int lane = int(threadIdx.x) & 31, copier = int(threadIdx.x) / 32 % kCopiers;
  const bool is_second = copier % 2 != 0, has_scales = copier >= 2;  // which part of a tile this warp copies
  LayerOnItsWay next_;
  Place ahead_ = {-1, 0, 0, 0};  // the next stage to prefetch
  PipelineState at_, landing_;
  unsigned prefetched_at_ = 0;
  int copied_ = 0, in_flight_ = 0, keys_ = 0;
};

}  // namespace
}  // namespace llm
