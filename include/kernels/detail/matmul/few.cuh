// Products with few tokens on tensor cores, for sm_80 and later: weights stream through shared memory.
//
//   a block:   up to 64 rows of weights x up to 32 tokens, K in steps
//   groups:    | steps 0 .. n/2 | steps n/2 .. n |   of warps, each with a share of the steps
//
//   ring:      | step i | step i+1 | step i+2 | ...   2, 3, 4 or 6 stages of: weights 64 x step | inputs 32 x step
//   a step:    16 bits: 256 bytes of a row of weights: | warp 0: 32 columns | warp 1 | warp 2 | warp 3 |
//              codes: 128 bytes of a row, each decoded by one warp only: warp 0: 32 rows / warp 1: 32 rows
//   mma:       tokens are the 16 rows, weights the 8 columns; with codes the other way around
//
// A step loads 128 or 256 contiguous bytes of each row, as DRAM is faster with long runs. The k of a fragment may be in
// any order that both operands share, so the 16 bytes that a lane reads are operands of two mma. Sums of warps and
// groups are added in their order, and if two blocks of a cluster share K (split-K), in the order of their ranks.
//
// All blocks run at the same time and read the same inputs. Each begins at a different step, so that they do not
// request the same lines of the L2 at the same time (14336 x 4096, 32 tokens: 32.0 instead of 34.7 us, 8 tokens 30.0
// instead of 31.0). With one warp on each scheduler, waiting, reading and multiplying alternate and leave memory idle,
// however deep the ring: tuning/matmul.h says what a second group gains (kStepsOfGroups).
#pragma once

#include "few_weights.cuh"

KERNELS_BEGIN
namespace detail {

// For up to 8 * kTiles tokens.
template <class P, int kTiles>
struct StreamedGemmBody {
  using X = typename P::X;
  using T = meeting_type<X, typename P::W>;
  static constexpr bool coded = !is_16_bit<typename Coded<typename P::W>::Code>;
  static constexpr int kRows = kStreamedRows, kTokens = 8 * kTiles, kWide = 4;
  static constexpr int kThreads = coded ? 64 : 128;  // of a group
  static constexpr int kMostGroups = coded ? 4 : 2;  // of a block
  static constexpr int kInputCols = 128;             // of a tile of inputs: a step has one or two
  static constexpr int kStep = coded ? 8 * Coded<typename P::W>::pack : kInputCols;
  using Weights = StreamedWeights<P, T, coded, kThreads, kStep>;
  using Inputs = TileOperand<T, X, kTokens, kThreads, 8, kInputCols>;
  static constexpr int kRuns = Weights::kRuns, kInputs = kStep / kInputCols;
  // Inputs that are not copied by cp.async wait in registers, if there is room (14336 x 4096, half, 32 tokens of float:
  // 35.5 us, with 168 registers 75; int4, normalized 60.6, waiting in registers 147).
  static constexpr int max_threads = kMostGroups * kThreads,
                       registers = !Inputs::copied ? 255 : !coded ? 168 : kTiles < 4 ? 128 : 168;
  // The most blocks that a multiprocessor runs at a time, and the fewest groups that these have together. With fewer,
  // memory idles; those that run in several rounds are rarely all there.
  static constexpr int kMostAtOnce = coded ? 4 : 3;
  static constexpr int least_groups(bool several_rounds) { return !coded ? 1 : several_rounds ? 6 : 4; }
  // For how many groups of each of so many blocks a multiprocessor has registers.
  static constexpr int groups_of(int blocks) { return 65536 / (blocks * kThreads * ((registers + 7) / 8 * 8)); }
  static constexpr bool kInputsWait = kInputs * sizeof(typename Inputs::Waiting) <= 512;
  static constexpr bool waits_for_predecessor_itself = true;

  struct Params {
    P problem;
    int rows;            // rows of weights in a block, including those of a gate: a multiple of 8 for each matrix
    int steps, longer;   // steps of a group; the first `longer` groups have one more
    int stages;          // 2, 3, 4 or 6, for each group
    bool wide_out;       // whether the sink takes packs of kWide
    bool weights_ready;  // weights may be read before the kernel ahead has ended
    int group_log2;      // of codes: see group_log2_of()
  };
  static KERNELS_HD int input_bytes(int64_t tokens) {
    return Inputs::copied && !coded && tokens <= 16 ? Inputs::kBytes / 2 : Inputs::kBytes;
  }
  static KERNELS_HD int stage_bytes(int64_t tokens, int group_log2) {
    return Weights::bytes(group_log2) + kInputs * input_bytes(tokens);
  }
  // Shared memory: the sums received from the other block of a pair, then the groups' rings, which the warps' sums
  // replace.
  static KERNELS_HD int received_bytes(unsigned splits) { return splits > 1 ? kTokens * kRows / 2 * 4 : 0; }
  static KERNELS_HD int shared_bytes(unsigned splits, int groups, int stages, int64_t tokens, int group_log2) {
    return received_bytes(splits) +
           groups * greater(stages * stage_bytes(tokens, group_log2), Weights::kParts * kSums * 4);
  }

  static __device__ __forceinline__ void run(const Params& params) {
    extern __shared__ __align__(128) unsigned char shared[];
    const P& p = params.problem;
    if (!params.weights_ready) arch::grid_dependency_pass();
    const unsigned rank = arch::cluster_rank(), splits = arch::cluster_size();
    if (splits > 1) arch::cluster_arrive_relaxed();
    const int tile = int(arch::cluster_index()), columns = int(p.k), stages = params.stages;
    const int64_t first_token = int64_t(blockIdx.y) * kTokens;
    const int tokens = int(lesser<int64_t>(kTokens, p.m - first_token)),
              stage_size = stage_bytes(p.m, params.group_log2);
    const int groups = blockDim.x / kThreads, group = threadIdx.x / kThreads;
    const int64_t output = int64_t(tile) * (params.rows / P::matrices);
    __shared__ Uninitialized<TokenState<X>, kTokens> states;
    const auto input = [&](int i, const auto& f) {
      f(states.items[i].bind(p.x), first_token + (i < tokens ? i : 0), i < tokens);
    };

    const Steps steps(params, int(rank) * groups + group, tile);
    const Copies copies(params, output, first_token, tokens);
    const Inputs x(input, 0);
    typename Inputs::Waiting waiting[kInputs];
    unsigned char *const rings = shared + received_bytes(splits), *const memory = rings + group * stages * stage_size;
    Ring<decltype(input)> ring{
        copies, x, input, memory, arch::shared_address(memory), columns, stage_size,
        Weights::bytes(params.group_log2), input_bytes(p.m), waiting,
        Weights::scaled && params.group_log2 != kOneForAll};
    if (params.weights_ready) {
      ring.prologue_weights(stages, steps);
      arch::grid_dependency_pass();
    }
    find_states<pack_within<X, 8>>(states.items, p.x, first_token, kTokens, p.m, p.k, blockIdx.x == 0);
    const int next = ring.prologue(stages, steps, params.weights_ready);

    __shared__ float factors[Weights::scaled ? kRows : 1];
    const auto multiply = [&](auto scaling) {
      typename Weights::template Lane<decltype(scaling)::value, kTiles> lane(params.group_log2);
      multiply_steps(ring, steps, next, stages, tokens, lane);
      arch::copy_async_wait<0>();
      if constexpr (Weights::scaled) {
        if (threadIdx.x < kRows) factors[threadIdx.x] = copies.weights.factor();
      }
      __syncthreads();
      lane.template keep<kPitch>(reinterpret_cast<float*>(rings) + (group * Weights::kParts + Weights::part()) * kSums,
                                 factors, tokens);
    };
    // Sums of many tokens would take more registers than there are, or more instructions than their weights.
    constexpr Scaling of_128 = kTiles < 4 ? Scaling::sums_of_128 : Scaling::weights,
                      of_32 = kTiles < 2 ? Scaling::sums_of_32 : Scaling::weights;
    if constexpr (!Weights::scaled) multiply(Always<Scaling::results>());
    else if (!ring.by_group) multiply(Always<Scaling::results>());
    else if (of_128 != Scaling::weights && params.group_log2 >= 7) multiply(Always<of_128>());
    else if (of_32 != Scaling::weights && params.group_log2 >= 5) multiply(Always<of_32>());
    else multiply(Always<Scaling::weights>());
    const Outputs outputs{params,
                          output,
                          first_token,
                          tokens,
                          rank,
                          splits,
                          groups * Weights::kParts,
                          reinterpret_cast<float*>(rings),
                          reinterpret_cast<float*>(shared)};
    if (params.wide_out) outputs.template hand_over<kWide>();
    else outputs.template hand_over<outputs_per_store<P>>();
  }

 private:
  static constexpr int kTileBytes = 8 * kInputCols * 2;  // of 8 tokens in a stage
  static constexpr int kPitch = kRows + 8;              // floats between the sums of two tokens in shared memory
  static constexpr int kSums = kTokens * kPitch;         // floats of a warp, or a group

  template <Scaling kScaling>
  using Always = std::integral_constant<Scaling, kScaling>;

  // Steps [first, end) of K, a group's share, in cyclic order from `begin` on.
  struct Steps {
    int first, end, count, begin;
    bool fewer;  // fewer than other groups
    __device__ __forceinline__ Steps(const Params& params, int part, int tile)
        : first(part * params.steps + lesser(part, params.longer)),
          end(first + params.steps + (part < params.longer ? 1 : 0)),
          count(end - first),
          begin(first + int(unsigned(tile) % unsigned(count))),
          fewer(part >= params.longer && params.longer > 0) {}
    __device__ __forceinline__ int after(int step) const { return step + 1 == end ? first : step + 1; }
  };

  // What a thread copies in each step.
  struct Copies {
    static constexpr int kTokensPerPass = kThreads / (kInputCols / 8), kEach = kTokens / kTokensPerPass;
    typename Weights::Copies weights;
    const T* inputs[Inputs::copied ? kEach : 1];
    int tokens;  // that are copied, from this thread's first one on

    __device__ __forceinline__ Copies(const Params& params, int64_t output, int64_t first_token, int tokens)
        : weights(params.problem, params.rows, output, int(params.problem.k), params.group_log2),
          tokens(kTiles < 4 ? tokens - row() : (tokens + 7) / 8 * 8) {
      if constexpr (Inputs::copied) {
        KERNELS_UNROLL
        for (int j = 0; j < kEach; ++j)
          inputs[j] = opaque(
              address_of(params.problem.x, first_token + lesser(j * kTokensPerPass + row(), tokens - 1), 0) +
              chunk() * 8);
      }
    }
    // Copies eight columns of some tokens. Where there are few, nothing is copied for those that do not exist: if all
    // blocks read the last token instead, they wait for its lines in the L2 (int4, 14336 x 4096, 2 tokens: 14.6 instead
    // of 11.7 us). With more tokens, all of the last eight are copied, which takes fewer instructions.
    __device__ __forceinline__ void load_inputs(uint32_t to, int col, int columns, bool more) const {
      const bool zeros = col + chunk() * 8 >= columns;
      KERNELS_UNROLL
      for (int j = 0; j < kEach; ++j)
        arch::copy_async_16_if(to + Inputs::swizzled_offset(row(), chunk()) + j * (kTokensPerPass * kInputCols * 2),
                               inputs[j] + col, more && j * kTokensPerPass < tokens, zeros);
    }
    static_assert(kTokensPerPass % 2 == 0, "all chunks of a thread are swizzled alike");

   private:
    static __device__ __forceinline__ int chunk() { return threadIdx.x % (kInputCols / 8); }
    static __device__ __forceinline__ int row() { return threadIdx.x % kThreads / (kInputCols / 8); }
  };

  // The ring of stages, and how a step of K gets into one. It refers to the thread's Copies: as members of the ring the
  // compiler would generate other code.
  template <class Input>
  struct Ring {
    const Copies& copies;
    const Inputs& x;
    const Input& input;
    unsigned char* memory;
    uint32_t address;
    int columns, stage_size, weight_size, input_size;
    typename Inputs::Waiting (&waiting)[kInputs];
    bool by_group;

    // Prologue: fills all stages but one. Weights can be loaded before the inputs; prologue() returns the next step.
    __device__ __forceinline__ void prologue_weights(int stages, const Steps& steps) const {
      for (int i = 0, step = steps.begin; i < lesser(stages - 1, steps.count); ++i, step = steps.after(step))
        load_step_weights(i * stage_size, step);
    }
    __device__ __forceinline__ int prologue(int stages, const Steps& steps, bool has_weights) {
      int step = steps.begin;
      for (int i = 0; i < stages - 1; ++i) {
        if (i < steps.count) {
          if (!has_weights) load_step_weights(i * stage_size, step);
          load_inputs(i * stage_size, step);
          store_inputs(i * stage_size, step);
          step = steps.after(step);
        }
        arch::copy_async_commit();
      }
      return step;
    }

    __device__ __forceinline__ void load_step_weights(int stage, int step) const {
      if (by_group)
        load_weights<Weights::scaled>(stage, step);
      else
        load_weights<false>(stage, step);
    }
    template <bool kByGroup>
    __device__ __forceinline__ void load_weights(int stage, int step, bool more = true) const {
      copies.weights.template load<kByGroup>(address + stage, step * kStep, columns, more);
    }
    // Starts loading inputs. Those that are not copied go to registers until they are stored, or are loaded only then.
    __device__ __forceinline__ void load_inputs(int stage, int step, bool more = true) {
      KERNELS_UNROLL
      for (int i = 0; i < kInputs; ++i) {
        const int col = step * kStep + i * kInputCols;
        if constexpr (Inputs::copied)
          copies.load_inputs(address + inputs_of(stage, i), col, columns, more);
        else if (kInputsWait && more) x.prefetch(waiting[i], input, 0, Inputs::kEach, col, columns);
      }
    }
    __device__ __forceinline__ void store_inputs(int stage, int step) const {
      if constexpr (!Inputs::copied) {
        KERNELS_UNROLL
        for (int i = 0; i < kInputs; ++i) {
          const int col = step * kStep + i * kInputCols;
          unsigned char* const to = memory + inputs_of(stage, i);
          if constexpr (kInputsWait) x.store(waiting[i], to, input, 0, Inputs::kEach, col, columns);
          else x.template load_and_store<256>(to, input, 0, Inputs::kEach, col, columns);
        }
      }
    }
    __device__ __forceinline__ int inputs_of(int stage, int i) const { return stage + weight_size + i * input_size; }
  };

  // Main loop: adds up a warp's share of all steps. step: the next one to load.
  template <class Input, class Lane>
  static __device__ __forceinline__ void multiply_steps(Ring<Input>& ring, const Steps& steps, int step, int stages,
                                                        int tokens, Lane& lane) {
    const int last_stage = (stages - 1) * ring.stage_size;
    int stage = 0, free = last_stage;  // byte offsets: the stage of the next step, and the one to load into
    int waits = 0;                     // stage and step of inputs that wait in registers
    int waiting_step = 0, here = steps.begin;
    const int inputs_at = opaque(int(Inputs::swizzled_offset((threadIdx.x & 31) / 4, Weights::chunk_of(0))));
    for (int i = 0; i < steps.count; ++i) {
      wait_for_step(stages);
      KERNELS_UNROLL
      for (int run = 0; run < kRuns; ++run) {
        uint32_t inputs[kTiles][4];
        read_inputs(ring.memory + ring.inputs_of(stage, run * kRunCols / kInputCols) +
                        (inputs_at ^ run * kRunCols % kInputCols * 2),
                    tokens, inputs);
        lane.read(ring.memory + stage, here * kStep, run);
        if (run == 0) {
          if (!(coded && stages == 2) && i > 0 && i + stages - 2 < steps.count) ring.store_inputs(waits, waiting_step);
          // With codes there is no branch: the compiler mixes decoding instructions with copies.
          const bool more = i + stages - 1 < steps.count;
          if (coded || more) {
            ring.template load_weights<Lane::by_group>(free, step, !coded || more);
            ring.load_inputs(free, step, !coded || more);
            waits = free, waiting_step = step;
            step = steps.after(step);
          }
          arch::copy_async_commit();
        }
        lane.multiply(inputs, tokens);
      }
      // With two stages, which only codes have, the next step is the one requested in this iteration.
      if (coded && stages == 2 && i + 1 < steps.count) ring.store_inputs(waits, waiting_step);
      here = steps.after(here);
      free = stage;
      stage = stage == last_stage ? 0 : stage + ring.stage_size;
    }
    // All groups pass the same number of barriers: compute-sanitizer's racecheck counts them, and otherwise reported
    // races across the block's next barrier. Only codes need it, whose row factors are read there.
    if (coded && steps.fewer) wait_for_group();
  }
  // Waits until the group's next step has arrived.
  static __device__ __forceinline__ void wait_for_step(int stages) {
    if (coded && stages == 2) arch::copy_async_wait<0>();
    else if (stages == 3) arch::copy_async_wait<1>();
    else if (stages == 4) arch::copy_async_wait<2>();
    else arch::copy_async_wait<4>();
    wait_for_group();
  }
  static __device__ __forceinline__ void wait_for_group() {
    arch::named_barrier_sync(1 + threadIdx.x / kThreads, kThreads);
  }
  // The inputs that a lane multiplies in a run, in the order of its weights.
  static __device__ __forceinline__ void read_inputs(const unsigned char* from, int tokens,
                                                     uint32_t (&inputs)[kTiles][4]) {
    KERNELS_UNROLL
    for (int j = 0; j < kTiles; ++j) {
      if (coded || j < 2 || tokens > 16) {
        memcpy(inputs[j], __builtin_assume_aligned(from + j * kTileBytes, 16), 16);
        order_pairs<typename Weights::Code>(inputs[j]);
      }
    }
  }

  // Epilogue: the warps' sums go through shared memory to the sink. Each block of a pair takes half of the results: a
  // block adds up its warps' sums of the other's half and writes them to the other's shared memory.
  struct Outputs {
    const Params& params;
    int64_t output, first_token;
    int tokens;
    unsigned rank, splits;
    int parts;
    float *sums, *received;  // sums: of the parts of the block's K; received: from the other block

    // A thread computes N results at a time.
    template <int N>
    __device__ __forceinline__ void hand_over() const {
      const int packs = params.rows / P::matrices / N, all = tokens * packs,
                share = (all + int(splits) - 1) / int(splits), begin = int(rank) * share;
      const int count = lesser(share, all - begin);
      if (splits > 1) {
        __syncthreads();
        arch::cluster_wait();  // the other block has started
        leave<N>(packs, int(1 - rank) * share, lesser(share, all - int(1 - rank) * share));
        arch::cluster_arrive();
      }
      bool waits = true;
#pragma unroll 1
      for (int i = int(threadIdx.x); i < count || waits; i += int(blockDim.x)) {
        const OutputPack<N> at(*this, begin + i, packs, i < count);
        __syncwarp();
        if (waits && splits > 1) arch::cluster_wait();
        else if (waits) __syncthreads();
        waits = false;
        if (at.there) put_pack(at, sums + at_pack<N>(begin + i, packs), received + i * (P::matrices * N));
      }
    }

   private:
    template <int N>
    static constexpr bool kPrepares = P::matrices == 1 && N == outputs_per_store<P>;
    template <int N>
    using Prepared = std::conditional_t<
        kPrepares<N>, decltype(prepare<outputs_per_store<P>>(sink_end(std::declval<const P&>().out), kAny, kAny)),
        Nothing>;
    // The place of a pack of results, and what the sink prepares before the sums are known.
    template <int N>
    struct OutputPack {
      int64_t row, col;
      bool there;
      Operands<P, N> operands;
      Prepared<N> prepared;

      __device__ __forceinline__ OutputPack(const Outputs& of, int i, int packs, bool wanted)
          : row(of.first_token + unsigned(i) / unsigned(packs)),
            col(of.output + int64_t(unsigned(i) % unsigned(packs)) * N),
            there(wanted && col < of.params.problem.n) {
        const P& p = of.params.problem;
        if (there) {
          if constexpr (P::matrices == 1) operands = Result<P, N>::fetch(p, row, col);
          if constexpr (kPrepares<N>) prepared = prepare<N>(sink_end(p.out), row, col);
        }
      }
    };

    template <int N>
    __device__ __forceinline__ void leave(int packs, int first, int count) const {
      float* const there = arch::in_block(received, 1 - rank);
#pragma unroll 1
      for (int i = int(threadIdx.x); i < count; i += int(blockDim.x)) {
        KERNELS_UNROLL
        for (int matrix = 0; matrix < P::matrices; ++matrix) {
          const Pack<float, N> sum = total<N>(sums + at_pack<N>(first + i, packs) + matrix * 8);
          float* const to = there + (i * P::matrices + matrix) * N;
          if constexpr (N == 4) {
            *reinterpret_cast<::float4*>(to) = {sum.v[0], sum.v[1], sum.v[2], sum.v[3]};
          } else {
            KERNELS_UNROLL
            for (int j = 0; j < N; ++j) to[j] = sum.v[j];
          }
        }
      }
    }
    template <int N>
    __device__ __forceinline__ void put_pack(const OutputPack<N>& at, const float* from, const float* left) const {
      Pack<float, N> whole[P::matrices];
      KERNELS_UNROLL
      for (int matrix = 0; matrix < P::matrices; ++matrix) {
        whole[matrix] = total<N>(from + matrix * 8);
        if (splits > 1) {
          const auto other = sums_at<N>(left + matrix * N);
          whole[matrix] = rank == 0 ? whole[matrix] + other : other + whole[matrix];
        }
      }
      Result<P, N>{params.problem, at.row, at.col, at.operands}.put_sums(whole, at.prepared);
    }
    // The address of a pack's sums in a part. With a gate, runs of 8 rows of the two matrices alternate.
    template <int N>
    static __device__ __forceinline__ int at_pack(int i, int packs) {
      const unsigned row = unsigned(i) / unsigned(packs), at = unsigned(i) % unsigned(packs) * N;
      return int(row * kPitch + (P::matrices == 1 ? at : at / 8 * 16 + at % 8));
    }
    // The total of all parts, in their order.
    template <int N>
    __device__ __forceinline__ Pack<float, N> total(const float* from) const {
      Pack<float, N> sum;
#pragma unroll 4
      for (int i = 0; i < parts; ++i) {
        const auto part = sums_at<N>(from + i * kSums);
        sum = i == 0 ? part : sum + part;
      }
      return sum;
    }
  };
};

// Calls f(kernel for so many tokens). With codes, products and loads for missing tokens would cost much.
template <class P, class F>
auto visit_streamed(int64_t tokens, const F& f) {
  if constexpr (StreamedGemmBody<P, 1>::coded) {
    if (tokens <= 8) return f(StreamedGemmBody<P, 1>());
    if (tokens <= 16) return f(StreamedGemmBody<P, 2>());
  }
  return f(StreamedGemmBody<P, kStreamedTokens / 8>());
}

}  // namespace detail
KERNELS_END
