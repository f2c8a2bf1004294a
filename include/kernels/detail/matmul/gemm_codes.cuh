// Products with many tokens for sm_90a and weights of 8 or 4 bits. wgmma takes these from registers: codes are copied
// to shared memory as they are, and each lane decodes its part of a fragment.
//
//   tile:        32 or 64 tokens x 128 rows of weights, or 128 x 256
//   a step:      64 columns
//   inputs:      | 2 steps | 2 steps | ...            a ring of stages
//   weights:     | 128 bytes of each row, their scales and zero points | ...   a ring of panels, of 2 steps or 4
//
//   producers    two warps for inputs and two for weights, as far ahead as the rings have room. If inputs, or codes,
//                are in rows of constant stride, one thread issues TMA copies of them instead
//   consumers    warpgroups, so that some decode while others multiply: three that share K and each have sums of the
//                whole tile, or two with 128 rows each
//
// Of eight adjacent codes of a row, lane t of four has codes 2t and 2t + 1. A scale for a whole row is applied to the
// sums, others to the weights, in 16 bits. Sums and split-K in clusters are as in gemm.cuh.
#pragma once

#include "codes.cuh"
#include "gemm.cuh"
#include "gemm_inputs.cuh"

KERNELS_BEGIN
namespace detail {

// What a lane reads of eight codes in shared memory, and the pair that it decodes from its two codes. `shift`: what the
// decoder subtracts, including zero points. `exponents`: kExponents in a register; of an instruction with two constants
// the compiler would copy one each time.
constexpr uint32_t kExponents = 0x64646464u;
template <class T, class Code>
struct LaneCodes {
  using Read = uint16_t;
  static constexpr int kBytes = 8;  // of eight codes
  static __device__ __forceinline__ int first_byte(int t) { return 2 * t; }
  template <class Zero>
  static __device__ __forceinline__ uint32_t shift(Zero zero) {
    return std::is_same<Code, int8_t>::value ? without<half, 1024 + 128>(zero) : 0;
  }
  static __device__ __forceinline__ uint32_t pair(Read codes, int, uint32_t shift, uint32_t exponents) {
    if constexpr (std::is_same<Code, int8_t>::value) {
      constexpr uint32_t one = pair_of<half>(1, 1);
      return halves_to<T>(arch::fma_pair<half>(__byte_perm(codes ^ 0x8080u, exponents, 0x4140), one, shift));
    } else {
      return Decoder<Code>::template pair<T>(codes);
    }
  }
};
// 4 bits: all four lanes read the word with the eight codes.
struct LaneWord {
  using Read = uint32_t;
  static constexpr int kBytes = 4;
  static __device__ __forceinline__ int first_byte(int) { return 0; }
  static __device__ __forceinline__ uint32_t shift(Nothing) { return 0; }
};
template <class T, int kOffset>
struct LaneNibbles : LaneWord {
  static constexpr int kBase = std::is_same<T, half>::value ? 1024 : 128;
  template <class Zero>
  static __device__ __forceinline__ uint32_t shift(Zero zero) {
    return without<T, kBase + kOffset>(zero);
  }
  static __device__ __forceinline__ uint32_t pair(Read word, int t, uint32_t shift, uint32_t) {
    constexpr uint32_t base = pair_of<T>(kBase, kBase), one = pair_of<T>(1, 1);
    return arch::fma_pair<T>(arch::mask_or<0x000f000fu, base>(word >> (4 * t)), one, shift);
  }
};
template <class T>
struct LaneCodes<T, Uint4> : LaneNibbles<T, 0> {};
template <class T>
struct LaneCodes<T, Int4> : LaneNibbles<T, 8> {};
template <class T>
struct LaneCodes<T, Fp4> : LaneWord {
  static __device__ __forceinline__ uint32_t pair(Read word, int t, uint32_t, uint32_t) {
    const uint32_t high = word << (12 - 4 * t);
    return fp4_pair<T>(high, high >> kFp4Shift<T>);
  }
};
template <class T>
struct LaneCodes<T, Gf4> : LaneWord {
  static __device__ __forceinline__ uint32_t pair(Read word, int t, uint32_t, uint32_t) {
    constexpr uint32_t base = pair_of<half>(1024, 1024), slope = pair_of<half>(-0.25f, -0.25f),
                       shift = pair_of<half>(257, 257), minus_zero = 0x80008000u;
    const uint32_t both = word >> (8 + 6 * t);
    const uint32_t codes = arch::mask_or<0x00070007u, base>(arch::join_halves(both & 0xffffu, both >> 3));
    const uint32_t scale = __byte_perm(word, 0, 0x0404);  // float8_e5m2 is the upper byte of a half
    return halves_to<T>(arch::fma_pair<half>(arch::fma_pair<half>(codes, slope, shift), scale, minus_zero));
  }
};

template <class P, class T>
struct CodedMaps {
  InputMaps<typename P::X, T> x;
  arch::TensorMap codes[P::matrices];
  bool has_codes = false;  // only together with inputs
};
template <class P, class T>
struct CodedGemmParams : GemmParams<P> {
  CodedMaps<P, T> maps;
};

template <class P, class T, int kRows_>
struct CodedGemmBody {
  using X = typename P::X;
  using Gate = FirstWeights<P>;
  using Code = typename Coded<Gate>::Code;
  using Params = CodedGemmParams<P, T>;
  using Maps = CodedMaps<P, T>;
  static constexpr int kRows = kRows_, kOutputs = kRows / P::matrices, kStep = 64;
  static constexpr int kShares = kRows == 128 ? 3 : 1;  // of K, one for each group
  static constexpr int kProducers = 64;                 // threads that load inputs, and as many for weights
  static constexpr int kConsumers = kShares * kRows;
  static constexpr int kTokens[3] = {32, 64, 128};
  static constexpr int max_threads = kConsumers + 2 * kProducers, registers = kRows == 128 ? 128 : 168;
  static constexpr int kTilesAtOnce = 1;
  static constexpr bool waits_for_predecessor_itself = true, weights_by_tma = false, copied = false,
                        weights_copied = true;
  static constexpr bool possible =
      Coded<Gate>::known && !is_16_bit<Code> && !by_token<typename P::W> && CodesInMemory<Gate>::value;
  // Few registers remain for what the sink reads ahead (14336 x 4096, int4, 64 and 256 tokens with a bias, GELU and a
  // residual: 27.4 and 68 us, with as many as in gemm.cuh 44.8 and 99).
  using Slabs = GemmSlabs<P, kShares, kDefaultOrder, kRows == 128 ? 32 : 64>;

  static constexpr bool has(int tokens, int architecture) {
    return possible && architecture == 90 && (tokens < 128) == (kRows == 128);
  }
  static constexpr GemmRing ring(int tokens, int, int, int room) {
    const int all = kPanels * panel_bytes() + stages_for(tokens) * kPair * step_bytes(tokens) + kGemmAligned;
    return {all <= room ? all : 0, false};
  }
  static void make_maps(const Exec& ex, const P& p, int tokens, Maps& maps) {
    maps.x.make(ex, p, tokens);
    if constexpr (codes_by_tma)
      maps.has_codes = maps.x.made && make_code_map(ex, p, p.template weights<0>(), maps.codes[0]) &&
                       make_code_map(ex, p, p.template weights<P::matrices - 1>(), maps.codes[P::matrices - 1]);
  }

  static __device__ __forceinline__ void run(const Params& params) {
    if constexpr (possible && arch::kWarpgroupMma) {
      extern __shared__ __align__(128) unsigned char shared[];
      __shared__ Uninitialized<TokenState<X>, 128> states;
      __shared__ Rings rings;
      const unsigned rank = arch::cluster_rank(), splits = arch::cluster_size();
      const P& p = params.problem;
      if (threadIdx.x == 0) rings.begin(params);
      const bool early = params.weights_ready && p.groups.offsets == nullptr;
      if (!early) arch::grid_dependency_pass();
      const Tile tile = tile_at<kOutputs>(params, arch::cluster_index());
      if (tile.token >= tile.token_end) return;
      __syncthreads();
      const int panels = int((p.k + kSteps * kStep - 1) / (kSteps * kStep));
      Work work{params, tile, rings, states.items, shared + (-arch::shared_address(shared) & (kGemmAligned - 1))};
      work.first_panel = int(int64_t(panels) * rank / splits);
      work.end_panel = int(int64_t(panels) * (rank + 1) / splits);
      work.end = lesser(work.end_panel * kSteps, int((p.k + kStep - 1) / kStep));
      // Weights may be loaded before the kernel ahead has ended.
      const int begun = early ? lesser(work.end_panel, work.first_panel + kPanels) : work.first_panel;
      if (early) {
        if (threadIdx.x >= kConsumers + kProducers) load_weights(work, work.first_panel, begun);
        arch::grid_dependency_pass();
      }
      find_states<pack_within<X, 8>>(states.items, p.x, tile.token, params.tokens, tile.token_end, p.k,
                                     tile.output == 0 && rank == 0);
      if constexpr (kRows == 256) run_tile<128>(work, begun);
      else if (params.tokens == 32) run_tile<32>(work, begun);
      else run_tile<64>(work, begun);
      if (threadIdx.x >= kConsumers) return;
      const int slabs = params.tokens / Slabs::kTokens;
      Slabs::put_slabs(params, tile, Slabs::of_warp(reinterpret_cast<float*>(work.memory), slabs), slabs, 0, rank,
                       splits);
    }
  }

 private:
  using Lane = LaneCodes<T, Code>;
  using Types = CodedTypes<Gate>;
  using Row = typename Types::Row;
  using Scale = typename Types::Scale;
  using Zero = typename Types::Zero;
  static constexpr bool scaled = Types::scaled, zeroed = Types::zeroed;
  static constexpr bool codes_by_tma = InputMaps<X, T>::possible && CodesInMemory<Gate>::in_rows;

  // A panel: codes, in which 16-byte chunk i of a row is at i ^ (row % 8); then kScaleRow bytes of scales for each row,
  // and as many of zero points.
  static constexpr int kPanel = 128, kSteps = kPanel / (8 * Lane::kBytes), kCodeBytes = kRows * kPanel;
  static constexpr int kScaleRow = 32, kScaleBytes = scaled ? kRows * kScaleRow : 0;
  // Groups that share K skip stages, always the same ones, as the number of stages is a multiple of kShares. Otherwise
  // a group could wait for a phase after having skipped the one before, and the parity does not distinguish those.
  static constexpr int kPanels = kRows == 256 ? 3 : 6, kMostStages = 6;
  static_assert(kPanels % kShares == 0, "as stages_for() has it");
  static KERNELS_HD constexpr int panel_bytes() { return kCodeBytes + (zeroed ? 2 : 1) * kScaleBytes; }
  static constexpr int kPair = 2;  // steps of a stage of inputs
  static KERNELS_HD constexpr int step_bytes(int tokens) { return tokens * kStep * 2; }
  static KERNELS_HD constexpr int stages_for(int tokens) {
    const int most = ((216 << 10) - kPanels * panel_bytes()) / (kPair * step_bytes(tokens));
    return (most < kMostStages ? most : kMostStages) / kShares * kShares;
  }

  static constexpr int kCopiers = 2;  // a named barrier
  struct Rings {
    uint64_t full[kMostStages], empty[kMostStages];
    uint64_t panel_full[kPanels], panel_empty[kPanels];
    const unsigned char* codes[kRows];  // of rows that threads copy, or null
    __device__ __forceinline__ void begin(const Params& params) {
      for (int i = 0; i < kMostStages; ++i)
        arch::mbarrier_init(&full[i], params.maps.x.are_there() ? 1 : kProducers),
            arch::mbarrier_init(&empty[i], kRows / 32);
      for (int i = 0; i < kPanels; ++i)
        arch::mbarrier_init(&panel_full[i],
                            (copies_codes_by_tma(params) ? 1 : 0) + (copies_weights(params) ? kProducers : 0)),
            arch::mbarrier_init(&panel_empty[i], kSteps / kPair * kRows);
      arch::mbarrier_init_fence();
    }
  };
  static __device__ __forceinline__ bool copies_codes_by_tma(const Params& params) {
    return codes_by_tma && params.maps.has_codes;
  }
  static __device__ __forceinline__ bool has_groups(const Params& params) {
    return scaled && params.group_log2 != kOneForAll;
  }
  // Whether threads copy anything of a panel.
  static __device__ __forceinline__ bool copies_weights(const Params& params) {
    return !copies_codes_by_tma(params) || has_groups(params);
  }
  // A block's work: steps from the beginning of first_panel to `end`.
  struct Work {
    const Params& params;
    const Tile& tile;
    Rings& rings;
    TokenState<X>* states;
    unsigned char* memory;  // panels, then inputs
    int first_panel, end_panel, end;

    __device__ __forceinline__ const P& problem() const { return params.problem; }
    __device__ __forceinline__ int first() const { return first_panel * kSteps; }
    __device__ __forceinline__ unsigned char* panel(int stage) const { return memory + stage * panel_bytes(); }
    __device__ __forceinline__ unsigned char* inputs() const { return memory + kPanels * panel_bytes(); }
  };
  // Calls f(matrix, row in it, whether it exists) for row i of a tile.
  template <class F>
  static __device__ __forceinline__ void visit_row(const Work& work, int i, const F& f) {
    const P& p = work.problem();
    const int64_t n = work.tile.output + (P::matrices == 1 ? i : i % kOutputs);
    const bool there = n < p.n;
    if (P::matrices == 2 && i >= kOutputs)
      f(p.template weights<P::matrices - 1>(), work.tile.weights + (there ? n : 0), there);
    else
      f(p.template weights<0>(), work.tile.weights + (there ? n : 0), there);
  }

  template <int kHeight>
  static __device__ __forceinline__ void run_tile(const Work& work, int next_panel) {
    if (threadIdx.x >= kConsumers) {
      arch::release_registers<kRows == 128 ? 80 : 88>();
      if (threadIdx.x >= kConsumers + kProducers)
        load_weights(work, next_panel, work.end_panel);
      else
        load_inputs<kHeight>(work);
    } else {
      arch::claim_registers<kRows == 128 ? 144 : 208>();
      const auto run_group = [&](auto by_group) {
        Group<kHeight, decltype(by_group)::value> mine(work);
        mine.run();
        mine.hand_over();
      };
      if (has_groups(work.params)) run_group(std::integral_constant<bool, scaled>());
      else run_group(std::false_type());
    }
  }

  // ---- producers ----------------------------------------------------------------------------------------------------

  template <class S>
  static bool make_code_map(const Exec& ex, const P& p, const S& weights, arch::TensorMap& map) {
    constexpr int kPack = Coded<Gate>::pack;
    const auto* const from = coded_row(weights, 0).codes;
    const int64_t stride = coded_row(weights, 1).codes - from, rows = p.groups.count * p.n;
    if (stride == 0 || rows > INT32_MAX) return false;
    return make_tensor_map(ex, {from, 1, (p.k * 16 + kPack - 1) / kPack, rows, 1, 1, stride, 0, 0}, kOutputs, map);
  }

  // What a thread copies of each panel: chunks of several rows, and the scales of some.
  class Copies {
   public:
    // known: the rows' addresses are already in shared memory, where other threads may be reading them.
    __device__ __forceinline__ Copies(const Work& work, bool known)
        : codes_(work.rings.codes), cols_(int(work.problem().k)), group_log2_(work.params.group_log2) {
      KERNELS_UNROLL
      for (int i = 0; i < kMine; ++i) {
        const int mine = i * kProducers + thread();
        visit_row(work, mine, [&](const Gate& source, int64_t row, bool there) {
          rows_[i] = coded_row(source, row);
          if (!copies_codes_by_tma(work.params) && !known) work.rings.codes[mine] = there ? rows_[i].codes : nullptr;
        });
      }
      if (copies_weights(work.params) && !known) arch::named_barrier_sync(kCopiers, kProducers);
    }
    // Copies a panel that begins at column `col`; everything beyond the last column becomes zeros.
    __device__ __forceinline__ void load_codes(uint32_t to, int col) const {
      constexpr int kPack = Coded<Gate>::pack, kRowsPerPass = kProducers / 8;
      const int chunk = thread() % 8, first = thread() / 8, bytes = bytes_there<kPack>(cols_ - col - chunk * kPack);
      const int64_t further = bytes == 0 ? 0 : int64_t(col / kPack) * 16 + chunk * 16;
      const uint32_t at = to + first * kPanel + (chunk ^ first) * 16;
#pragma unroll 4
      for (int i = 0; i < kRows; i += kRowsPerPass) {
        const unsigned char* const row = codes_[first + i];
        if (row == nullptr) continue;
        if (bytes == 16) arch::copy_async_16(at + i * kPanel, row + further);
        else arch::copy_async_16(at + i * kPanel, row + further, bytes);
      }
    }
    __device__ __forceinline__ void load_scales(uint32_t to, int col) const {
      KERNELS_UNROLL
      for (int i = 0; i < kMine; ++i) {
        const uint32_t at = to + (i * kProducers + thread()) * kScaleRow;
        copy_groups<kSteps * kStep>(at, rows_[i].scales, col, cols_, group_log2_);
        if constexpr (zeroed) copy_groups<kSteps * kStep>(at + kScaleBytes, rows_[i].zeros, col, cols_, group_log2_);
      }
    }

   private:
    static constexpr int kMine = kRows / kProducers;
    static __device__ __forceinline__ int thread() { return threadIdx.x % kProducers; }
    const unsigned char* const* const codes_;
    int cols_, group_log2_;
    Row rows_[kMine];
  };

  // Producer loop of weights: panels [begin, end).
  static __device__ __forceinline__ void load_weights(const Work& work, int begin, int end) {
    const Params& params = work.params;
    const bool by_tma = copies_codes_by_tma(params), by_threads = copies_weights(params);
    const bool first_warp = threadIdx.x / 32 == (kConsumers + kProducers) / 32;
    if (!by_threads && !first_warp) return;
    const Copies copies(work, begin > work.first_panel);
    PipelineState at(kPanels);
    at.advance(begin - work.first_panel);
#pragma unroll 1
    for (int panel = begin; panel < end; ++panel, at.advance(1)) {
      if (panel - work.first_panel >= kPanels)
        arch::mbarrier_wait_in_block(&work.rings.panel_empty[at.stage], at.parity ^ 1);
      const uint32_t to = arch::shared_address(work.panel(at.stage));
      uint64_t* const full = &work.rings.panel_full[at.stage];
      const int col = panel * (kSteps * kStep);
      if (!by_tma) {
        copies.load_codes(to, col);
      } else if (first_warp && arch::elect_one()) {
        arch::mbarrier_arrive_expect(full, kCodeBytes);
        KERNELS_UNROLL
        for (int i = 0; i < P::matrices; ++i)
          arch::copy_box(to + i * (kOutputs * kPanel), params.maps.codes[i], panel * kPanel,
                         int(work.tile.weights + work.tile.output), 0, 0, full);
      }
      if constexpr (scaled) {
        if (has_groups(params)) copies.load_scales(to + kCodeBytes, col);
      }
      if (by_threads) arch::mbarrier_arrive_copied(full);
    }
  }

  template <int kHeight>
  static __device__ __forceinline__ void load_inputs(const Work& work) {
    using ByThreads = InputsByThreads<T, X, kHeight, kProducers>;
    constexpr int kStages = stages_for(kHeight);
    static_assert(ByThreads::kBytes == step_bytes(kHeight) && kStages >= 2, "as the host counts");
    const auto& maps = work.params.maps.x;
    const Tile& tile = work.tile;
    Rings& rings = work.rings;
    // Calls load(stage, its barrier, its first step) when the stage is free. Steps beyond the last column are zeros.
    const auto each_stage = [&](const auto& load) {
      PipelineState at(kStages);
#pragma unroll 1
      for (int step = work.first(); step < work.end; step += kPair) {
        if (step - work.first() >= kPair * kStages) arch::mbarrier_wait_in_block(&rings.empty[at.stage], at.parity ^ 1);
        load(work.inputs() + at.stage * (kPair * ByThreads::kBytes), &rings.full[at.stage], step);
        at.next();
      }
    };
    if constexpr (InputMaps<X, T>::possible) {
      if (maps.made) {
        if (threadIdx.x / 32 != kConsumers / 32 || !arch::elect_one()) return;
        const auto boxes = maps.of_tile(tile, kHeight);
        return each_stage([&](unsigned char* to, uint64_t* full, int step) {
          arch::mbarrier_arrive_expect(full, kPair * boxes.bytes());
          KERNELS_UNROLL
          for (int i = 0; i < kPair; ++i)
            boxes.copy(arch::shared_address(to) + i * ByThreads::kBytes, (step + i) * kStep, full);
        });
      }
    }
    ByThreads x(work.problem(), tile, work.states, work.first() * kStep);
    each_stage([&](unsigned char* to, uint64_t* full, int step) {
#pragma unroll 1
      for (int i = 0; i < kPair; ++i) x.load(to + i * ByThreads::kBytes, (step + i) * kStep);
      x.arrive(full);
    });
  }

  // ---- consumers ----------------------------------------------------------------------------------------------------

  // The four rows of a lane in two fragments, [fragment][upper or lower], as rows of the tile. Outputs of a warp are
  // adjacent.
  static __device__ __forceinline__ int first_row() {
    const int warp = threadIdx.x % kRows / 32;
    return warp * (P::matrices == 1 ? 32 : 16) + (threadIdx.x & 31) / 4;
  }
  static KERNELS_HD constexpr int further_row(int i) { return i / 2 * (P::matrices == 1 ? 16 : kOutputs) + i % 2 * 8; }

  // The scales and zero points of these rows: applied to the sums, for whole rows, or to the weights.
  template <bool kByGroup>
  class LaneRows {
   public:
    __device__ __forceinline__ explicit LaneRows(const Work& work) : group_log2_(work.params.group_log2) {
      exponents_ = kExponents | unsigned(work.problem().k) >> 31;  // adds a 0 that the compiler does not know
      KERNELS_UNROLL
      for (int i = 0; i < 4; ++i) {
        float zero = 0;
        if constexpr (scaled) {
          visit_row(work, first_row() + further_row(i), [&](const Gate& source, int64_t row, bool) {
            const Row here = coded_row(source, row);
            if constexpr (!kByGroup) factor_[i] = convert<float>(*here.scales);
            of_word_[i] = unsigned(reinterpret_cast<uintptr_t>(here.scales) & 3);
            if constexpr (zeroed) {
              if constexpr (!kByGroup) zero = convert<float>(*here.zeros);
              of_word_[i] |= unsigned(reinterpret_cast<uintptr_t>(here.zeros) & 3) << 8;
            }
          });
        }
        if constexpr (zeroed) shift_[i] = Lane::shift(zero);
        else shift_[i] = Lane::shift(Nothing{});
      }
    }
    // For a panel that begins at column `col`.
    __device__ __forceinline__ void begin(int col) {
      if constexpr (kByGroup) {
        const unsigned first = unsigned(col) >> group_log2_;
        KERNELS_UNROLL
        for (int i = 0; i < 4; ++i) {
          const int row = (first_row() + further_row(i)) * kScaleRow;
          scale_at_[i] = row + int((of_word_[i] + first * sizeof(Scale)) & 3);
          if constexpr (zeroed) zero_at_[i] = row + kScaleBytes + int(((of_word_[i] >> 8) + first * sizeof(Zero)) & 3);
        }
      }
    }
    // Reads those of the groups that begin with slice `slice` of 16 columns of a stage, or with the stage; `at`: the
    // stage's first column in the panel.
    __device__ __forceinline__ void read(const unsigned char* words, int at, int slice) {
      if constexpr (kByGroup) {
        if (slice != 0 && (slice * 16 & ((1 << group_log2_) - 1)) != 0) return;
        const int number = (at + slice * 16) >> group_log2_;
        KERNELS_UNROLL
        for (int i = 0; i < 4; ++i) {
          scale_[i] = pair_of_scale<T>(value<Scale>(words + scale_at_[i], number));
          if constexpr (zeroed) shift_[i] = Lane::shift(convert<float>(value<Zero>(words + zero_at_[i], number)));
        }
      }
    }
    // Decodes a fragment of 16 columns.
    template <class Codes>
    __device__ __forceinline__ void decode(uint32_t (&fragment)[4], const Codes& codes, int i, int t) const {
      KERNELS_UNROLL
      for (int j = 0; j < 4; ++j) {
        const int row = 2 * i + j % 2;
        fragment[j] = Lane::pair(codes.read[row][j / 2], t, shift_[row], exponents_);
        if constexpr (kByGroup) fragment[j] = arch::fma_pair<T>(fragment[j], scale_[row], 0x80008000u);
      }
    }
    __device__ __forceinline__ float factor(int fragment, int lower) const { return factor_[2 * fragment + lower]; }

   private:
    template <class Of>
    static __device__ __forceinline__ Of value(const unsigned char* from, int number) {
      return reinterpret_cast<const Of*>(from)[number];
    }

    int group_log2_;
    float factor_[4];
    uint32_t scale_[4], shift_[4], exponents_;
    unsigned of_word_[4];           // the byte in a word at which a row's first scale (and zero point) is
    int scale_at_[4], zero_at_[4];  // offsets in a panel
  };

  // The addresses in a panel of 16 columns of a lane's first row; the other rows are a multiple of the row's bytes
  // further.
  struct LaneOffsets {
    int at[4];
    __device__ __forceinline__ LaneOffsets() {
      const int row = first_row();
      KERNELS_UNROLL
      for (int slice = 0; slice < 4; ++slice) {
        const int byte = slice * 2 * Lane::kBytes;
        at[slice] =
            row * kPanel + (byte / 16 ^ (row % 8 & (kChunks - 1))) * 16 + byte % 16 + Lane::first_byte(threadIdx.x % 4);
      }
    }
    // The further offset of step `step` of a panel.
    static __device__ __forceinline__ int of_step(int step) {
      return ((step * kChunks) ^ (first_row() % 8 & ~(kChunks - 1))) * 16;
    }
    static constexpr int kChunks = kPanel / kSteps / 16;  // of a step
  };
  // The codes that a lane reads there: [row][the first eight columns or the others].
  struct Codes16 {
    using Read = typename Lane::Read;
    Read read[4][2];
    __device__ __forceinline__ explicit Codes16(const unsigned char* from) {
      constexpr bool together = sizeof(Read) == Lane::kBytes;
      KERNELS_UNROLL
      for (int i = 0; i < 4; ++i) {
        KERNELS_UNROLL
        for (int j = 0; j < (together ? 1 : 2); ++j) {
          constexpr int kBytes = together ? 2 * Lane::kBytes : int(sizeof(Read));
          const unsigned char* const there = from + further_row(i) * kPanel + j * Lane::kBytes;
          memcpy(&read[i][j], __builtin_assume_aligned(there, kBytes), kBytes);
        }
      }
    }
  };

  // The work of a consumer warpgroup.
  template <int kHeight, bool kByGroup>
  class Group {
   public:
    __device__ __forceinline__ explicit Group(const Work& work)
        : work_(work),
          rings_(work.rings),
          inputs_by_tma_(work.params.maps.x.are_there()),
          x_(arch::warpgroup_tile(arch::shared_address(work.inputs()))),
          rows_(work),
          at_(stages_for(kHeight)),
          panel_at_(kPanels),
          panel_(work.first_panel) {}
    // A stage at a time. Half of a step's fragments are decoded while the products of the other half run. No products
    // run from one stage into the next: ptxas does not see that all threads of a group continue together, and would
    // wait after each product.
    __device__ __forceinline__ void run() {
      const int share = kShares == 1 ? 0 : __shfl_sync(0xffffffffu, int(threadIdx.x / kRows), 0);  // uniform
#pragma unroll 1
      for (step_ = work_.first() + share * kPair; step_ < work_.end; step_ += kShares * kPair) {
        uint32_t early[2][2][4], late[2][2][4];
        begin_stage();
        decode(early, 0);
        arch::mbarrier_wait_in_block(&rings_.full[at_.stage], at_.parity);
        if (!inputs_by_tma_) arch::async_proxy_fence();
        begin_products(early, 0);
        decode(late, 2);
        begin_products(late, 2);
        KERNELS_UNROLL
        for (int slice = kSlices; slice < kPair * kSlices; slice += kSlices) {
          arch::warpgroup_wait<1>();
          decode(early, slice);
          begin_products(early, slice);
          arch::warpgroup_wait<1>();
          decode(late, slice + 2);
          begin_products(late, slice + 2);
        }
        arch::warpgroup_wait<0>();
        // wgmma reads inputs for a whole warp, but each lane reads its own codes of a panel, so every lane arrives
        // there.
        arch::mbarrier_arrive(&rings_.panel_empty[panel_at_.stage]);
        if ((threadIdx.x & 31) == 0) arch::mbarrier_arrive(&rings_.empty[at_.stage]);
      }
    }
    // Stores the sums in shared memory, as the slabs of the warps, in place of the rings.
    __device__ __forceinline__ void hand_over() {
      static_assert(kConsumers / 32 * kBlocks * Slabs::kFloats * 4 <=
                        kPanels * panel_bytes() + stages_for(kHeight) * kPair * step_bytes(kHeight),
                    "room for them");
      KERNELS_UNROLL
      for (int i = 0; i < kBlocks; ++i) {
        arch::pin(sums_[i]);
        KERNELS_UNROLL
        for (int j = 0; j < 32; ++j) {
          if constexpr (scaled && !kByGroup) sums_[i][j] *= rows_.factor(j / 16, j % 4 / 2);
        }
      }
      arch::named_barrier_sync(Slabs::kBarrier, kConsumers);
      float* const mine = Slabs::of_warp(reinterpret_cast<float*>(work_.memory), kBlocks);
      KERNELS_UNROLL
      for (int i = 0; i < kBlocks; ++i) Slabs::lay_out(mine + i * Slabs::kFloats, sums_[i]);
    }

   private:
    static constexpr int kBlocks = kHeight / 32, kSlices = kStep / 16;  // of a step

    // Advances to a stage and its panel, and waits for the panel.
    __device__ __forceinline__ void begin_stage() {
      const int panels = step_ / kSteps - panel_, stages = (step_ - work_.first()) / kPair - stage_;
      panel_ += panels, stage_ += stages;
      panel_at_.advance(panels), at_.advance(stages);
      rows_.begin(panel_ * (kSteps * kStep));
      arch::mbarrier_wait_in_block(&rings_.panel_full[panel_at_.stage], panel_at_.parity);
    }
    // Decodes the fragments of two slices of 16 columns of the stage.
    __device__ __forceinline__ void decode(uint32_t (&fragments)[2][2][4], int slice) {
      const int of_panel = step_ % kSteps;
      const unsigned char* const codes = work_.panel(panel_at_.stage);
      const unsigned char* const from = codes + LaneOffsets::of_step(of_panel + slice / kSlices);
      KERNELS_UNROLL
      for (int j = 0; j < 2; ++j) {
        rows_.read(codes + kCodeBytes, of_panel * kStep, slice + j);
        const Codes16 read(from + offsets_.at[slice % kSlices + j]);
        KERNELS_UNROLL
        for (int i = 0; i < 2; ++i) rows_.decode(fragments[j][i], read, i, threadIdx.x % 4);
      }
    }
    __device__ __forceinline__ void begin_products(uint32_t (&fragments)[2][2][4], int slice) {
      const uint64_t inputs = arch::advance_tile(
          x_, (at_.stage * kPair + slice / kSlices) * (step_bytes(kHeight) / 16) + slice % kSlices * 2);
      arch::pin(fragments[0]), arch::pin(fragments[1]);
      arch::warpgroup_fence();
      KERNELS_UNROLL
      for (int j = 0; j < 2; ++j) {
        arch::warpgroup_mma<T, 0>(sums_, fragments[j][0], arch::advance_tile(inputs, 2 * j));
        arch::warpgroup_mma<T, 1>(sums_, fragments[j][1], arch::advance_tile(inputs, 2 * j));
      }
      arch::warpgroup_commit();
    }

    const Work& work_;
    Rings& rings_;
    const bool inputs_by_tma_;
    const uint64_t x_;
    LaneRows<kByGroup> rows_;
    const LaneOffsets offsets_;
    float sums_[kBlocks][32] = {};
    PipelineState at_, panel_at_;
    int step_, panel_, stage_ = 0;
  };
};

}  // namespace detail
KERNELS_END
