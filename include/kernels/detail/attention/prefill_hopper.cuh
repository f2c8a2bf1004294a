// The prefill kernels for sm_90a: barriers, and which warpgroup is a producer or a consumer. prefill_hopper_parts.cuh
// has the picture.
#pragma once

#include "prefill_hopper_consumer.cuh"
#include "prefill_hopper_producer.cuh"

KERNELS_BEGIN
namespace detail {

template <class P, int kDim_, int kCols_, int kKeys_, int kGroups_, bool k8Bit_ = false>
struct HopperPrefillBody : HopperPrefillParts<P, kDim_, kCols_, kKeys_, kGroups_, k8Bit_> {
  using Parts = HopperPrefillParts<P, kDim_, kCols_, kKeys_, kGroups_, k8Bit_>;
  using Params = typename Parts::Params;
  using Shared = typename Parts::Shared;
  using Parts::kStages, Parts::kItems, Parts::kQueryStages, Parts::kProducers, Parts::kGroups, Parts::kAligned;
  using Parts::kTilesAt;

  static __device__ __forceinline__ void run(const Params& params) {
    if constexpr (arch::kWarpgroupMma) {
      extern __shared__ __align__(1024) unsigned char whole_memory[];
      Shared& shared = *reinterpret_cast<Shared*>(whole_memory);
      if (arch::shared_address(whole_memory) % kAligned != 0) __trap();
      unsigned char* const memory = whole_memory + kTilesAt;
      if (threadIdx.x == 0) {
        // Arrivals: all producer threads; of consumers one lane of each warp, or all threads if there are scales.
        constexpr int producers = 128, of_keys = (Parts::Key::scaled ? 128 : 4) * kGroups,
                      of_values = (Parts::Value::scaled ? 128 : 4) * kGroups;
        KERNELS_UNROLL
        for (int i = 0; i < kStages; ++i) {
          arch::mbarrier_init(&shared.keys_full[i], producers), arch::mbarrier_init(&shared.values_full[i], producers);
          arch::mbarrier_init(&shared.keys_empty[i], of_keys), arch::mbarrier_init(&shared.values_empty[i], of_values);
        }
        KERNELS_UNROLL
        for (int i = 0; i < (Parts::k8Bit ? kStages : 0); ++i) arch::mbarrier_init(&shared.copied_full[i], producers);
        KERNELS_UNROLL
        for (int i = 0; i < kItems; ++i)
          arch::mbarrier_init(&shared.item_full[i], 2 * producers),
              arch::mbarrier_init(&shared.item_empty[i], 128 * (kGroups + kProducers - 1));
        KERNELS_UNROLL
        for (int i = 0; i < kQueryStages; ++i) arch::mbarrier_init(&shared.queries_empty[i], 4 * kGroups);
        arch::mbarrier_init_fence();
      }
      __syncthreads();
      if (threadIdx.x < 128) {
        HopperProducer<Parts>::produce(params, shared, memory);
      } else if (threadIdx.x < 128 * kProducers) {
        if constexpr (kProducers == 2) HopperProducer<Parts>::produce_values(params, shared, memory);
      } else {
        HopperConsumer<Parts>::consume(params, shared, memory);
      }
    }
  }
};

}  // namespace detail
KERNELS_END
