// The host side of matmul(): chooses the kernel, tile, grid and cluster for a call, and launches it.
#pragma once

#include "../../core/matmul_plan.h"
#include "../../exec.cuh"
#include "../../tuning/matmul.h"
#include "few.cuh"
#include "gemm_boxes.cuh"
#include "gemm_codes.cuh"
#include "gemm_simt.cuh"
#include "rounded.cuh"
#include "tensor_dots.cuh"

KERNELS_BEGIN
namespace detail {

// kOnly: the only path that is compiled, or automatic for all.
template <class P, Path kOnly>
class ProductEngine {
 public:
  using X = typename P::X;
  using W = typename P::W;
  using C = typename P::C;
  using Gate = FirstWeights<P>;
  static constexpr int wide = widest_of<W>(), wide_x = widest_of<X>(), chunk_x = pack_within<X, 8>;
  static constexpr int simt_pack = pack_within<X, (wide < 4 ? wide : 4)>;
  // Whether tensor cores may be used: they would round nothing but the inputs.
  static constexpr bool narrow_weights = std::is_same<C, float>::value && wide >= 8 && !by_token<W>;
  static constexpr bool has_skinny = Coded<W>::known && std::is_same<C, float>::value && !by_token<W>;
  // Whether tiles are copied as they are in memory, whatever K is.
  static constexpr bool copied = is_16_bit<copied_type<W>> && std::is_same<copied_type<X>, copied_type<W>>::value;
  static constexpr bool codes = has_skinny && !is_16_bit<typename Coded<W>::Code>;  // of 8 or 4 bits
  // The operand type of the tensor cores; and below, whether each operand is copied without conversion if its alignment
  // allows.
  using T = meeting_type<X, W>;
  // The type of operands that are multiplied as 8-bit codes, or void.
  using Type8Bit = mma_8bit_type<X, W>;
  static constexpr bool x_copied = std::is_same<copied_type<X>, T>::value,
                        w_copied = std::is_same<copied_type<W>, T>::value;

  ProductEngine(const Exec& ex, const P& problem, const MatmulPolicy& policy)
      : ex_(ex), p_(problem), policy_(policy), pack_x_(max_pack_of(problem.x)), pack_w_(max_pack_of(problem.w)) {
    if (is_gathered<X>::value)
      policy_.weights_ready = false;  // rows' order, which the kernel ahead may write, is read first
  }

  // Fills in what the policy leaves open.
  Status plan(MatmulPlan& plan) const {
    KERNELS_TRY(ex_.status());
    KERNELS_TRY(choose_path(plan.path));
    RoundedOperands rounded;
    KERNELS_TRY(choose_rounded(plan.path, rounded));
    if (rounded.any()) {
      plan.path = policy_.path, plan.inputs_rounded = rounded.inputs, plan.weights_rounded = rounded.weights;
      return with_rounded(rounded, [&](const auto& engine) { return engine.plan(plan); });
    }
    if (plan.path == Path::gemm) KERNELS_TRY(run_gemm(&plan));
    if (plan.path == Path::skinny) plan.weights_copied = streaming_fits();
    const bool tiles = plan.path == Path::gemm;
    const int most = tiles ? 8 : plan.path == Path::simt ? simt_pack : wide,
              most_x = tiles && chunk_x == 1 ? most : lesser(most, wide_x);
    const bool whole = p_.k % most == 0 || (tiles && copied);
    const bool in_packs = whole && pack_w_ >= most && pack_x_ >= most_x;
    plan.weight_pack = plan.path == Path::gemv ? gemv_pack() : in_packs ? most : 1;
    plan.input_pack = plan.path == Path::gemv ? lesser(gemv_pack(), wide_x) : in_packs ? most_x : 1;
    // Products of 8-bit codes have no faster alternative, so the alignment of other kernels does not matter.
    if (!plan.in_eight) plan.why_not = why_not(plan.path, plan.weights_copied, most, most_x, whole);
    return {};
  }

  Status run() const {
    KERNELS_TRY(ex_.status());
    Path path = policy_.path;
    KERNELS_TRY(choose_path(path));
    RoundedOperands rounded;
    KERNELS_TRY(choose_rounded(path, rounded));
    if (rounded.any()) {
      KERNELS_TRY(round(rounded));
      return with_rounded(rounded, [](const auto& engine) { return engine.run(); });
    }
    if constexpr (compiled(Path::gemv)) if (path == Path::gemv) return run_gemv();
    if constexpr (compiled(Path::skinny)) if (path == Path::skinny) return run_skinny();
    if constexpr (compiled(Path::gemm)) if (path == Path::gemm) return run_gemm();
    if constexpr (compiled(Path::simt)) if (path == Path::simt) return run_simt();
    return unsupported("matmul: no such path");
  }

  // The bytes of workspace for the operands that are worth rounding once.
  size_t workspace_bytes() const {
    Path path = policy_.path;
    if (!choose_path(path)) return 0;
    const RoundedOperands rounded = worth_rounding(path);
    return input_bytes(rounded) + weight_bytes(rounded);
  }

 private:
  static constexpr bool compiled(Path path) { return kOnly == Path::automatic || kOnly == path; }

  const char* why_not(Path path, bool weights_copied, int most, int most_x, bool whole) const {
    if (!has_skinny && worth_rounding(path).weights)
      return "weights: each block reads them through their functors; a workspace of matmul_workspace_bytes() would hold them in 16 bits";
    if (narrow_weights && !Coded<W>::known)
      return "weights: a map, or zero points that are not whole numbers of 8 bits, must be applied before tensor cores can take them";
    if (pack_w_ < most)
      return "weights: pointer or row stride is not a multiple of 16 bytes, or a scale is for fewer columns than 16 bytes hold";
    if (worth_rounding(path).inputs) {
      if (x_copied)
        return "x: pointer or row stride is not a multiple of 16 bytes; a workspace of matmul_workspace_bytes() would hold it so";
      return "x: each block reads it through its functors, or rounds it; a workspace of matmul_workspace_bytes() would hold it in 16 bits";
    }
    if (pack_x_ < most_x)
      return "x: pointer or row stride is not a multiple of 16 bytes, or a map takes narrower packs";
    const bool few = has_skinny && path == Path::gemm && p_.m <= kStreamedTokens && !p_.groups.several();
    const bool could_stream = has_streaming && path == Path::skinny && p_.m > most_in_one_go();
    if constexpr (codes && CodesInMemory<Gate>::value) if (p_.k > 0 && (path == Path::gemm || could_stream)) {
      if (group_log2() < 0)
        return "weights: they are copied as they lie where codes begin at multiples of 16 bytes, and scales, of 4 bytes at most, are all for as many columns: 16 of 8 bits, 32 of 4, or more";
      if ((few || !weights_copied) && p_.k % Coded<W>::pack == 0 && !copies_codes())
        return "weights: they are copied as they lie where each row's scales and zero points begin at multiples of 4 bytes; tiles with wgmma take them anywhere";
      if (!weights_copied && p_.k % Coded<W>::pack != 0) return "K is not a multiple of the weights that 16 bytes hold";
      if (!weights_copied) return "weights: a block of this device has not the shared memory for a few stages of them";
    }
    if (!whole || (few && p_.k % wide != 0)) return "K is not a multiple of the weights that 16 bytes hold";
    if (few && policy_.batch_invariant) return "policy: batch_invariant makes tiles for a few tokens, too";
    if (path == Path::simt || (path == Path::gemv && !narrow_weights && p_.m > tuning::kGemvTokens))
      return "weights: tensor cores would round float and double";
    if (worth_rounding(path).weights)
      return "weights: each block decodes them; a workspace of matmul_workspace_bytes() would hold them in 16 bits";
    return "";
  }

  // ---- operands rounded ahead, in the workspace: inputs first, then weights ----------------------------------------

  struct RoundedOperands {
    bool inputs, weights;
    bool any() const { return inputs || weights; }
  };
  static constexpr bool can_round = narrow_weights && (compiled(Path::gemm) || compiled(Path::skinny)),
                        rounds_weights = can_round && compiled(Path::gemm) && !w_copied;
  RoundedOperands worth_rounding(Path path) const {
    // Kernels that read rows of weights in one go also multiply the rounding errors of inputs, so they do not use this.
    const bool tiles = path == Path::gemm || (path == Path::skinny && streaming_fits());
    if (!can_round || p_.k == 0 || !tiles || (path == Path::gemm && uses_8bit_mma())) return {false, false};
    const bool many = p_.m > tuning::kSkinnyTokens || policy_.batch_invariant || p_.groups.several();
    const bool weights = rounds_weights && path == Path::gemm && policy_.tile_tokens == 0 && policy_.tile_rows == 0 &&
                         policy_.tiles_at_once == 0 && !policy_.batch_invariant && !p_.groups.several() &&
                         p_.m >= decode_ahead_tokens();
    const bool inputs = many && (!x_copied || (pack_x_ < 8 && (pack_w_ >= 8 || weights)));
    return {inputs && (has_skinny || weights), weights};
  }
  // From this number of tokens on, decoding the weights once pays.
  int64_t decode_ahead_tokens() const {
    if constexpr (codes && CodesInMemory<Gate>::value) {
      using Code = typename Coded<W>::Code;
      constexpr bool floats = std::is_same<Code, float8_e4m3>::value || std::is_same<Code, float8_e5m2>::value;
      const int log2 = group_log2();
      const bool by_group = Coded<W>::scaled && log2 != kOneForAll;
      if (log2 >= 0 && p_.k % 8 == 0)
        return floats && !by_group ? tuning::kDecodeAheadFloatTokens : tuning::kDecodeAheadTokens;
    }
    return tuning::kDecodeAheadMappedTokens;
  }
  // The rows of inputs if every group is full.
  int64_t input_rows() const { return p_.groups.offsets == nullptr ? p_.groups.count * p_.m : p_.m; }
  size_t input_bytes(const RoundedOperands& rounded) const {
    return rounded.inputs ? row_bytes() * size_t(input_rows()) : 0;
  }
  size_t weight_bytes(const RoundedOperands& rounded) const {
    return rounded.weights ? row_bytes() * size_t(p_.n) * P::matrices : 0;
  }
  size_t row_bytes() const { return sizeof(T) * size_t(rounded_ld(p_.k)); }

  // What a call rounds ahead: as much as the workspace holds.
  Status choose_rounded(Path path, RoundedOperands& rounded) const {
    rounded = worth_rounding(path);
    const Workspace& workspace = ex_.workspace();
    if (!rounded.any()) return {};
    if (workspace.bytes > 0 && reinterpret_cast<uintptr_t>(workspace.ptr) % 16 != 0)
      return invalid("matmul: the workspace does not begin at a multiple of 16 bytes");
    const bool inputs_fit = workspace.bytes >= input_bytes(rounded);
    // Otherwise a row's bits would depend on its batch.
    if (policy_.batch_invariant && workspace.bytes > 0 && !inputs_fit)
      return invalid("matmul: with batch_invariant a workspace has matmul_workspace_bytes(), or there is none");
    rounded.weights &= inputs_fit && workspace.bytes >= input_bytes(rounded) + weight_bytes(rounded);
    rounded.inputs &= inputs_fit && (has_skinny || rounded.weights);
    return {};
  }
  T* rounded_inputs() const { return static_cast<T*>(ex_.workspace().ptr); }
  T* rounded_weights(const RoundedOperands& rounded, int matrix) const {
    return rounded_inputs() + (input_bytes(rounded) + weight_bytes(rounded) / P::matrices * matrix) / sizeof(T);
  }
  Status round(const RoundedOperands& rounded) const {
    if constexpr (can_round) {
      if (rounded.inputs) KERNELS_TRY(round_rows(ex_, p_.x, rounded_inputs(), input_rows(), p_.k, p_.groups));
      if constexpr (rounds_weights) {
        if (!rounded.weights) return {};
        KERNELS_TRY(round_rows(ex_, p_.template weights<0>(), rounded_weights(rounded, 0), p_.n, p_.k));
        if constexpr (P::matrices == 2)
          KERNELS_TRY(round_rows(ex_, p_.template weights<1>(), rounded_weights(rounded, 1), p_.n, p_.k));
      }
    }
    return {};
  }
  // Calls f(engine of the same product with its operands in the workspace).
  template <class F>
  Status with_rounded(const RoundedOperands& rounded, const F& f) const {
    if constexpr (can_round) {
      const auto rows = [&](const T* p) { return kernels::load(p, rounded_ld(p_.k)); };
      const auto with_inputs = [&](const auto& x) {
        if constexpr (rounds_weights) {
          // So many tokens that decoding once pays use tiles.
          constexpr Path path = has_skinny ? Path::gemm : kOnly;
          const auto w = rows(rounded_weights(rounded, 0));
          if constexpr (P::matrices == 2) {
            if (rounded.weights) return with_operands<path>(x, gated(w, rows(rounded_weights(rounded, 1))), f);
          } else {
            if (rounded.weights) return with_operands<path>(x, w, f);
          }
        }
        if constexpr (has_skinny) return with_operands<kOnly>(x, p_.w, f);
        return unsupported("matmul: these operands are not rounded once");
      };
      if constexpr (x_copied)
        if (!rounded.inputs) return with_inputs(p_.x);
      return with_inputs(cached(rows(rounded_inputs())));
    }
    return unsupported("matmul: these operands are not rounded once");
  }
  template <Path kPath, class X2, class W2, class F>
  Status with_operands(const X2& x, const W2& w, const F& f) const {
    using Problem = ProductProblem<X2, W2, typename P::Out>;
    // A kernel that rounds inputs lets the product start when its own predecessor has ended: then the weights are
    // ready. With constant_weights() it lets it start at once, and the caller must have declared the weights ready.
    // Weights that the kernel decodes itself are not ready.
    Exec product_ex = ex_;
    product_ex.programmatic(ex_.programmatic() || kCapturesEarly).workspace(nullptr, 0);
    MatmulPolicy policy = policy_;
    policy.weights_ready = std::is_same<W2, W>::value && (policy_.weights_ready || !ex_.constant_weights());
    return f(ProductEngine<Problem, kPath>(product_ex, {x, w, p_.out, p_.m, p_.n, p_.k, p_.groups}, policy));
  }

  Status choose_path(Path& path) const {
    if (path == Path::automatic) path = kOnly;
    if (!compiled(path)) return unsupported("matmul: another path than the one that is compiled");
    if (path == Path::automatic && policy_.batch_invariant)
      path = by_token<W> ? Path::gemv : narrow_weights ? Path::gemm : Path::simt;
    if (policy_.batch_invariant && path != Path::gemm && path != Path::simt && !by_token<W>)
      return unsupported("matmul: batch_invariant goes with the gemm and simt paths");
    if (path == Path::automatic) {
      if (p_.groups.several()) path = narrow_weights ? Path::gemm : Path::simt;
      else if (streaming_pays())
        path = Path::skinny;
      else if (skinny_fits() && p_.m >= first_skinny && p_.m <= tuning::kSkinnyTokens) path = Path::skinny;
      else if (by_token<W> || p_.m <= most_gemv_tokens() || gemv_beats_tiles()) path = Path::gemv;
      else path = narrow_weights ? Path::gemm : Path::simt;
    }
    if (path == Path::skinny && !skinny_fits() && !streaming_fits())
      return unsupported(
          "matmul: the skinny path needs weights of 16 bits or fewer, and rows of both operands at multiples of 16 bytes");
    if (p_.groups.several() && path != Path::gemm && path != Path::simt)
      return unsupported("matmul: groups go with the gemm and simt paths");
    if (by_token<W> && (path != Path::gemv || p_.groups.several()))
      return unsupported("matmul: weights that differ from token to token go with the gemv path, without groups");
    if (path != Path::gemm && (policy_.tile_tokens != 0 || policy_.tile_rows != 0 || policy_.tiles_at_once != 0))
      return unsupported("matmul: a tile can be asked of the gemm path alone");
    if (path == Path::gemm && !narrow_weights) return unsupported("matmul: tensor cores would round these weights");
    if (path == Path::simt && narrow_weights)
      return unsupported("matmul: tensor cores make tiles of these weights: use the gemm path");
    return {};
  }

  // Up to this number of tokens CUDA cores are faster than tiles: two if 16-bit operands are not aligned for copies
  // (4096 x 4096: 35 us, in halves of packs 18.5, in tiles about 65).
  int most_gemv_tokens() const {
    if (!has_skinny) return tuning::kGemvTokens;
    return w_copied && (pack_w_ < 8 || pack_x_ < chunk_x) ? tuning::kSkinnyTokens : 1;
  }

  // For floats, which tensor cores would round. With few tokens and outputs there are few tiles.
  bool gemv_beats_tiles() const {
    if constexpr (!narrow_weights && sizeof(C) == 4) {
      const double waves = lesser(waves_of_simt<128>(), waves_of_simt<64>()), sums = double(p_.m) * double(p_.n);
      return gemv_pack() > 1 && sums < waves * ex_.device().sm_count * tuning::kSumsOfGemv;
    }
    return false;
  }

  // Weights that have to be decoded use tensor cores from the first token on.
  static constexpr int first_skinny = codes ? 1 : 2;

  bool skinny_fits() const {
    if constexpr (has_skinny) {
      using Dots = TensorDots<P, 2, 1>;
      return pack_x_ >= lesser(Dots::kEach, wide_x) && pack_w_ >= Dots::pack && p_.k % Dots::pack == 0;
    }
    return false;
  }

  // Whether weights can stream through shared memory.
  static constexpr bool streams() {
    if constexpr (!has_skinny || chunk_x < 2) return false;
    else if constexpr (codes)
      return StreamedGemmBody<P, 1>::Weights::possible;
    else return is_16_bit<copied_type<W>>;
  }
  static constexpr bool has_streaming = streams();
  // Up to this number of tokens, each row of weights is read in one go instead, which keeps all digits of wider inputs.
  int most_in_one_go() const { return codes && chunk_x >= 8 && !fine_scales() ? 1 : tuning::kSkinnyTokens; }
  bool streaming_fits() const {
    if constexpr (has_streaming) {
      if (p_.m <= most_in_one_go() || pack_x_ < chunk_x || p_.k <= 0 || p_.k % 8 != 0) return false;
      if constexpr (codes) {
        if (!copies_codes()) return false;
        const int least =
            visit_streamed<P>(p_.m, [&](auto body) { return body.shared_bytes(1, 1, 2, p_.m, group_log2()); });
        return least <= ex_.device().shared_per_block - tuning::kSharedOverheadBytes;
      } else {
        return pack_w_ >= 8;
      }
    }
    return false;
  }

  // Whether streaming is faster than tiles.
  bool streaming_pays() const {
    if (!streaming_fits()) return false;
    if constexpr (has_streaming && narrow_weights && compiled(Path::gemm)) {
      const int64_t rows = p_.n * P::matrices, sms = ex_.device().sm_count;
      if (p_.m > kStreamedTokens) {
        // Where blocks cannot share K, tiles leave most multiprocessors idle.
        int image = 0;
        return p_.m <= 2 * kStreamedTokens && rows * 3 <= 128 * sms &&
               image_architecture<GemmBody<P, meeting_type<X, W>, 1, 128>>(ex_, image).ok() && image < 90;
      }
    }
    return p_.m <= kStreamedTokens;
  }

  // The weights that a lane reads at a time: a pack; with 16 bits half a pack (matrices of a file that is copied to the
  // device as a whole are aligned to 8 bytes); or one.
  static constexpr int half_wide = w_copied && wide == 8 ? 4 : 1;
  int gemv_pack() const {
    const auto fits = [&](int n) { return pack_w_ >= n && pack_x_ >= lesser(n, wide_x) && p_.k % n == 0; };
    return codes ? 1 : fits(wide) ? wide : fits(half_wide) ? half_wide : 1;
  }
  Status run_gemv() const {
    [[maybe_unused]] const int pack = gemv_pack();
    if constexpr (!codes && wide > 1) if (pack == wide) return gemv_of<wide>();
    if constexpr (!codes && half_wide > 1) if (pack == half_wide) return gemv_of<half_wide>();
    return start_gemv<GemvBody<P, PlainDots<P, 1, 4, 1>, 4>>(tuning::kGemvThreads);
  }
  template <int N>
  Status gemv_of() const {
    if constexpr (!by_token<W> && !has_skinny) {
      if constexpr (!narrow_weights && sizeof(C) == 4) {
        if (p_.m > tuning::kGemvTokens)
          return start_gemv<GemvBody<P, PlainDots<P, N, 4 / P::matrices, 8>, 2>>(tuning::kGemvThreads);
      }
      if (p_.m > 1) return start_gemv<GemvBody<P, PlainDots<P, N, 2, 4>, 2>>(tuning::kGemvThreads);
    }
    constexpr bool heavy = sizeof(TokenState<X>) > 16;  // means and variances
    constexpr int rows = !starts_normed<X> ? tuning::kGemvRows
                         : heavy           ? tuning::kGemvRowsHeavy
                                           : tuning::kGemvRowsNormed;
    using Body = GemvBody<P, PlainDots<P, N, rows / P::matrices, 1>, 1>;
    const bool at_once = !starts_normed<X> && p_.k <= tuning::kGemvThreadsAtOnce / 32 * Body::step;
    return start_gemv<Body>(heavy     ? tuning::kGemvThreadsHeavy
                            : at_once ? tuning::kGemvThreadsAtOnce
                                      : tuning::kGemvThreads);
  }
  Status run_skinny() const {
    if constexpr (has_streaming) {
      if (streaming_fits()) return run_streamed();
    }
    if constexpr (has_skinny) {
      if constexpr (Coded<W>::scaled) {
        if (fine_scales()) {
          if (p_.m == 1) return start_skinny<GemvBody<P, FineDots<P, 1>, 1>>(tuning::kFineThreads);
          return start_skinny<GemvBody<P, FineDots<P, 2>, 1>>(tuning::kFineThreads);
        }
      }
      // With more than one token, codes usually stream instead.
      return start_skinny<GemvBody<P, TensorDots<P, tuning::kSkinnyRows / P::matrices, (codes ? 1 : 2)>, 1>>(
          codes ? tuning::kSkinnyThreads : tuning::kGemvThreads);
    }
    return unsupported("matmul: no skinny path for these weights");
  }
  bool fine_scales() const {
    if constexpr (Coded<W>::scaled)
      return has_fine_scales(p_.template weights<0>()) || has_fine_scales(p_.template weights<P::matrices - 1>());
    return false;
  }
  // For rows of few bytes: a warp takes a quarter of a row, so its fixed costs count for less. But if nearly all blocks
  // fit at the same time, they are made to fit (8192 x 8192, int4 with a scale for 32: 7 warps took 12.6 us, 8 and a
  // second wave 17.5).
  template <class Body>
  Status start_skinny(int most) const {
    if (!Body::few_warps) return start_gemv<Body>(most);
    const int64_t blocks = (p_.n + Body::R - 1) / Body::R * ((p_.m + Body::M - 1) / Body::M),
                  sms = ex_.device().sm_count;
    const int64_t quarter = (p_.k + 4 * Body::step - 1) / (4 * Body::step),
                  room = 65536 / 32 / Body::registers / ((blocks + sms - 1) / sms);
    return start_gemv<Body>(
        int(lesser<int64_t>(most, 32 * greater<int64_t>(1, 4 * room >= 3 * quarter ? room : quarter))));
  }
  Status run_streamed() const {
    return visit_streamed<P>(p_.m, [&](auto body) { return run_streamed_as<decltype(body)>(); });
  }
  template <class Body>
  Status run_streamed_as() const {
    int image = 0;
    KERNELS_TRY(image_architecture<Body>(ex_, image));
    const int64_t sms = ex_.device().sm_count, token_tiles = (p_.m + kStreamedTokens - 1) / kStreamedTokens,
                  tokens = lesser<int64_t>(p_.m, kStreamedTokens), outputs = p_.n * P::matrices,
                  all = outputs * token_tiles;
    if (token_tiles > 65535) return unsupported("matmul: M is too large for this path");
    const bool wide_out = p_.n % Body::kWide == 0 && max_pack_of(p_.out) >= Body::kWide;
    typename Body::Params params{p_, 0, 0, 0, 0, wide_out, policy_.weights_ready, codes ? group_log2() : 0};
    const double cost_of_inputs = tuning::kCostOfInputs * Coded<W>::pack / 8;  // weights have fewer bytes
    Launch how;
    int64_t blocks = 0;
    int at_once = 1;  // blocks that a multiprocessor runs at a time
    double best = HUGE_VAL;
    const bool four_bits = Coded<W>::pack == 32;
    const int most = ex_.device().shared_per_block - tuning::kSharedOverheadBytes, fewest = Body::coded ? 2 : 3;
    const auto bytes = [&](int splits, int groups, int stages) {
      return Body::shared_bytes(unsigned(splits), groups, stages, p_.m, params.group_log2);
    };
    // The most groups of warps of each of so many blocks on a multiprocessor, and whether it runs so many at a time.
    const auto most_groups = [&](int of_blocks) {
      return lesser(Body::groups_of(of_blocks), four_bits && of_blocks > 1 ? tuning::kCodeGroups : Body::kMostGroups);
    };
    const auto fit_at_once = [&](int of_blocks, bool several_rounds) {
      const int groups = (Body::least_groups(several_rounds) + of_blocks - 1) / of_blocks;
      return of_blocks <= Body::kMostAtOnce && groups <= most_groups(of_blocks) &&
             of_blocks * (bytes(1, groups, fewest) + tuning::kSharedOverheadBytes) <= ex_.device().shared_per_sm;
    };
    // Rows for each block such that all multiprocessors are busy: one block each, if those can hold all rows. Then
    // pairs of blocks can share K. Otherwise as few rounds of blocks as possible.
    const bool can_be_alone = (outputs + Body::kRows - 1) / Body::kRows * token_tiles <= sms;
    const bool pairs = image >= 90 && p_.k >= 16 * Body::kStep && bytes(2, 1, fewest) <= most;
    for (int splits = 1; splits <= (pairs ? 2 : 1); ++splits) {
      for (int rows = Body::kRows; rows > 0; rows -= 8 * P::matrices) {
        const int64_t count = (outputs + rows - 1) / rows * token_tiles * splits, each = (count + sms - 1) / sms;
        if (each > 1 && (splits > 1 || can_be_alone)) break;
        int64_t rounds = (each + Body::kMostAtOnce - 1) / Body::kMostAtOnce, together;
        while ((together = (each + rounds - 1) / rounds) > 2 && !fit_at_once(int(together), rounds > 1)) ++rounds;
        double busiest = double(each) * rows / splits;
        if (each > 1) {
          busiest = codes ? tuning::cost_of_rounds(rounds, together, each, rows, four_bits && Body::kTokens > 8)
                          : busiest * tuning::kCostOfBusiest;
        }
        const double cost = greater(double(all), double(sms) * busiest) * (1 + cost_of_inputs * double(tokens) / rows);
        if (cost >= best) continue;
        best = cost, blocks = count, params.rows = rows, how.cluster = splits, at_once = int(together);
      }
    }
    // Deep rings for blocks that are alone, and more groups of warps. They leave no room for other blocks on the
    // multiprocessor, including those of the next kernel, which would gather on some multiprocessors.
    const bool alone = blocks <= sms;
    const auto fit = [&](int groups, int stages) {
      const int wanted = bytes(how.cluster, groups, stages);
      return wanted <= most && at_once * (wanted + tuning::kSharedOverheadBytes) <= ex_.device().shared_per_sm;
    };
    int groups = 1, stages = fewest;
    if (Body::coded) {
      groups = int(lesser<int64_t>(most_groups(at_once), greater<int64_t>(1, p_.k / Body::kStep / how.cluster)));
      while (groups > 1 && !fit(groups, stages)) --groups;
      if (!four_bits && fit(groups, 3)) stages = 3;
    } else {
      if (alone && p_.k >= tuning::kStepsOfGroups * Body::kStep * how.cluster && fit(Body::kMostGroups, stages))
        groups = Body::kMostGroups;
      if (alone && fit(groups, 6)) stages = 6;
      else if ((alone || blocks > 2 * sms) && fit(groups, 4)) stages = 4;
    }
    params.stages = stages;
    const int parts = groups * how.cluster, steps = int((p_.k + Body::kStep - 1) / Body::kStep);
    params.steps = steps / parts, params.longer = steps % parts;
    how.threads = groups * Body::kThreads;
    how.shared =
        size_t(greater(bytes(how.cluster, groups, stages), lesser(ex_.device().shared_per_sm / (at_once + 1), most)));
    if (blocks > INT32_MAX) return unsupported("matmul: N is too large for this path");
    how.grid = dim3(unsigned(blocks / token_tiles), unsigned(token_tiles));
    return launch<Body>(ex_, how, params);
  }
  // Grid: outputs along x, tokens along y. A block has the fewest threads, `most` at most, that take a row of weights
  // in the least number of rounds.
  template <class Body>
  Status start_gemv(int most) const {
    const int64_t steps = (p_.k + Body::step - 1) / Body::step, units = (steps + Body::under_way - 1) / Body::under_way;
    const int64_t warps = most / 32, goes = (units + warps - 1) / warps;
    const int64_t token_tiles = (p_.m + Body::M - 1) / Body::M;
    const int64_t layers = (token_tiles + 65534) / 65535;  // a grid has at most 65535 blocks along y
    if (layers > 65535) return unsupported("matmul: M is too large for this path");
    Launch how;
    how.threads = goes == 0 ? 32 : int((units + goes - 1) / goes) * 32;
    how.shared = size_t(how.threads / 32 * Body::bytes_of_warp);
    how.grid =
        dim3(unsigned((p_.n + Body::R - 1) / Body::R), unsigned((token_tiles + layers - 1) / layers), unsigned(layers));
    return launch<Body>(ex_, how, {p_, policy_.weights_ready});
  }

  // With a plan: only fills it in.
  Status run_gemm(MatmulPlan* plan = nullptr) const {
    if constexpr (narrow_weights) {
      using Single = GemmBody<P, T, 1, 128>;
      using Narrow = GemmBody<P, T, 8, 128>;
      using Wide = GemmBody<P, T, 8, 256>;
      int image = 0;  // the architecture of all of them: they are compiled together
      KERNELS_TRY(image_architecture<Single>(ex_, image));
      if constexpr (can_use_8bit_mma()) {
        bool taken = false;
        if (uses_8bit_mma()) KERNELS_TRY(run_tma<Type8Bit>(image, plan, taken));
        if (taken) return {};
      }
      if constexpr (chunk_x > 1) {
        if (pack_x_ >= chunk_x && pack_w_ >= 8 && (Narrow::copied || p_.k % 8 == 0)) {
          if constexpr (TmaGemmBody<P, T, 128>::possible) {
            bool taken = false;
            KERNELS_TRY(run_tma<T>(image, plan, taken));
            if (taken) return {};
          }
          if constexpr (CodedGemmBody<P, T, 128>::possible) {
            bool taken = false;
            KERNELS_TRY(run_coded<T>(image, plan, taken));
            if (taken) return {};
          }
          if constexpr (codes) {
            bool taken = false;
            KERNELS_TRY(run_coded_mma<T>(image, plan, taken));
            if (taken) return {};
          }
          const Choice narrow = cheapest<Narrow>(image);
          if constexpr (Wide::copied) {
            const Choice wide = cheapest<Wide>(image);
            if (wide.cost < narrow.cost) return start_gemm<Wide>(wide, plan);
          }
          return start_gemm<Narrow>(narrow, plan);
        }
      }
      return start_gemm<Single>(cheapest<Single>(image), plan);
    }
    return unsupported("matmul: no tensor-core path for these weights");
  }
  static constexpr bool can_use_8bit_mma() {
    if constexpr (std::is_void<Type8Bit>::value || !narrow_weights)
      return false;
    else
      return TmaGemmBody<P, Type8Bit, 128>::possible;
  }
  // Whether codes of inputs and weights are multiplied as they are: by wgmma, with rows at multiples of 16 bytes, and
  // with scales for whole steps or rows.
  bool uses_8bit_mma() const {
    if constexpr (can_use_8bit_mma()) {
      bool has = false;
      const bool several = p_.groups.several(),
                 suit = scales_suit_inputs(p_.x, p_.k) &&
                        scales_suit_weights(p_.template weights<0>(), p_.k, p_.n, several) &&
                        scales_suit_weights(p_.template weights<P::matrices - 1>(), p_.k, p_.n, several) &&
                        group_log2() >= 0;
      return p_.k > 0 && p_.k <= kMost8BitColumns && pack_x_ >= 16 && pack_w_ >= 16 && suit &&
             has_code<TmaGemmBody<P, Type8Bit, 128>>(ex_, has).ok() && has;
    }
    return false;
  }
  // Whether the sink does.
  bool takes_packs_of_8() const { return p_.n % 8 == 0 && max_pack_of(p_.out) >= 8; }
  template <class Body>
  int64_t tiles(int tokens) const { return token_tiles(p_, tokens) * output_tiles<Body>(); }
  template <class Body>
  int64_t output_tiles() const { return (p_.n + Body::kOutputs - 1) / Body::kOutputs; }
  // The number of tiles that have tokens. If only the device knows the sizes of groups, an estimate: the mean of the
  // number with equal groups, and of that with half-full last tiles.
  template <class Body>
  int64_t tiles_with_tokens(int tokens) const {
    if (p_.groups.offsets == nullptr) return tiles<Body>(tokens);
    const int64_t groups = lesser(p_.groups.count, p_.m), each = (p_.m + groups - 1) / groups,
                  equal = groups * ((each + tokens - 1) / tokens), unequal = p_.m / tokens + groups / 2;
    return greater(groups, (equal + unequal) / 2) * output_tiles<Body>();
  }
  // The tile that the policy asks for, or the one with the least cost: waves of blocks times the time of each. In a
  // cluster blocks share K, if it is long enough. tokens == 0: there is no such tile.
  struct Choice {
    int tokens, cluster;
    double cost;
    GemmRing ring{};
  };
  template <class Body>
  Choice cheapest(int image) const {
    Choice best{0, 1, HUGE_VAL};
    if (policy_.tile_rows != 0 && policy_.tile_rows != Body::kRows) return best;
    if (policy_.tiles_at_once != 0 && policy_.tiles_at_once != Body::kTilesAtOnce) return best;
    const int64_t steps = (p_.k + Body::kStep - 1) / Body::kStep,
                  most = policy_.batch_invariant || image < 90 || Body::kTilesAtOnce > 1
                             ? 1
                             : lesser<int64_t>(kPortableCluster, steps / 8);
    int64_t blocks_at_a_time[kPortableCluster + 1];
    for (int cluster = 1; cluster == 1 || cluster <= most; cluster += any_cluster<Body> ? 1 : cluster)
      blocks_at_a_time[cluster] = in_clusters_at_a_time<Body>(cluster);
    for (const int tokens : Body::kTokens) {
      if (!Body::has(tokens, image) || (policy_.tile_tokens != 0 && policy_.tile_tokens != tokens)) continue;
      const GemmRing ring = Body::ring(tokens, image, ex_.device().capability,
                                       ex_.device().shared_per_block - tuning::kSharedOverheadBytes);
      if (ring.bytes == 0) continue;
      for (int cluster = 1; cluster == 1 || cluster <= most; cluster += any_cluster<Body> ? 1 : cluster) {
        const int64_t room = blocks_at_a_time[cluster];
        if (room == 0) continue;
        const int64_t waves = (tiles_with_tokens<Body>(tokens) * cluster + room - 1) / room;
        const double cost = cost_of<Body>(tokens, cluster, double(waves), double(steps));
        if (cost < best.cost) best = {tokens, cluster, cost, ring};
      }
    }
    return best;
  }
  // in_panels: tiles whose weights are copied as codes. any_cluster: whether clusters of any size are considered, and
  // the device is asked how many of them run at the same time. Costs of the other tiles were measured with powers of
  // two, and without asking.
  template <class Body>
  static constexpr bool in_panels = std::is_same<typename Body::Params, CodedGemmParams<P, T>>::value;
  template <class Body>
  static constexpr bool any_cluster = Body::weights_by_tma || in_panels<Body>;
  // The blocks that run at the same time in clusters of this size, one on each multiprocessor; 0: such clusters do not
  // run.
  template <class Body>
  int64_t in_clusters_at_a_time(int cluster) const {
    const int64_t sms = ex_.device().sm_count;
    if (cluster <= 2) return sms;
    if constexpr (any_cluster<Body>) {
      Launch how;
      how.threads = Body::max_threads, how.cluster = cluster, how.grid.x = unsigned(cluster);
      // The stages of one tile; those of the others take about as much.
      int bytes = gemm_stages(90, 128, 128, false) * gemm_stage_bytes(128, 128) + kGemmAligned;
      if constexpr (in_panels<Body>) bytes = Body::ring(Body::kRows == 128 ? 64 : 128, 90, 0, 1 << 20).bytes;
      how.shared = size_t(bytes);
      int64_t clusters = 0;
      if (resident_clusters<Body>(ex_, how, clusters).ok())
        return lesser(clusters, greater<int64_t>(1, sms / cluster)) * cluster;
    }
    return greater<int64_t>(1, sms * 3 / 4);
  }
  template <class Body>
  double cost_of(int tokens, int cluster, double waves, double steps) const {
    if constexpr (in_panels<Body>)
      return tuning::cost_of_codes(waves, steps / cluster, cluster, tokens, Body::kRows);
    else if constexpr (!Body::weights_by_tma)
      return waves * (steps / cluster + tuning::kBlockOverheadSteps) * tuning::cost_of_step(tokens, Body::kRows);
    const double weight_bytes =
        128. / Body::kStep * P::matrices * double(p_.groups.count) * double(p_.n) * double(p_.k);
    const int64_t filled = tiles_with_tokens<Body>(tokens);
    const double copied_bytes = double(filled) * steps * gemm_stage_bytes(tokens, Body::kRows);
    const auto leave = cluster == 1 && in_boxes<Body>(tokens) ? tuning::Results::in_boxes
                       : takes_packs_of_8()                   ? tuning::Results::in_packs
                                                              : tuning::Results::one_by_one;
    if (Body::kTilesAtOnce > 1)
      return tuning::cost_of_ping_pong(waves, steps, leave, tokens, weight_bytes, copied_bytes,
                                       ex_.device().memory_gbs);
    const double each = double((int64_t(steps) + cluster - 1) / cluster);
    const bool few_blocks = 2 * filled * cluster <= ex_.device().sm_count;
    double longer = 1;
    if constexpr (!std::is_void<Type8Bit>::value) {
      if (has_factors())
        longer = Body::kRows == 256 ? tuning::kLongerWithFactors : tuning::kLongerWithFactorsNarrow;
      else if (adds_steps<Type8Bit>())
        longer = Body::kRows == 256 ? tuning::kLongerByAdding : tuning::kLongerByAddingNarrow;
    }
    const auto by = in_rows<X, T> || in_rows<X, Type8Bit> ? tuning::InputsBy::tma_unit
                    : x_copied                            ? tuning::InputsBy::copies_of_threads
                                                          : tuning::InputsBy::functors;
    return tuning::cost_of_tma(waves, each, cluster, few_blocks, by, longer, leave, tokens, Body::kRows, weight_bytes,
                               copied_bytes, ex_.device().memory_gbs);
  }
  // Whether results leave by TMA, if blocks do not share K.
  template <class Body>
  bool in_boxes(int tokens) const {
    if constexpr (Body::weights_by_tma)
      return Body::has_boxes && Body::Results::can_be(p_, tokens) && !has_factors();
    else
      return false;
  }
  // Whether sums of steps have factors; below, whether threads add up these sums because tensor cores do not sum over
  // all of K.
  bool has_factors() const { return scaled_by_steps(p_.x, p_.k) || scaled_by_steps(p_.template weights<0>(), p_.k); }
  template <class T>
  bool adds_steps() const {
    return sizeof(T) == 1 && (has_factors() || (std::is_same<T, float8_e4m3>::value && !policy_.fast_sums));
  }
  // For weights that TMA can copy.
  template <class T>
  Status run_tma(int image, MatmulPlan* plan, bool& taken) const {
    KERNELS_TRY((has_code<TmaGemmBody<P, T, 128>>(ex_, taken)));
    if (!taken) return {};
    using Narrow = TmaGemmBody<P, T, 128>;
    Choice best = cheapest<Narrow>(image);
    auto start = &ProductEngine::template start_tma<Narrow>;
    consider<TmaGemmBody<P, T, 64>>(image, best, start), consider<TmaGemmBody<P, T, 256>>(image, best, start);
    // If threads add up sums of steps, a group that is alone at its tile would leave the tensor cores idle meanwhile.
    if (!adds_steps<T>() && (kHandsOverSoon || policy_.tiles_at_once > 1))
      consider<TmaGemmBody<P, T, 128, true>>(image, best, start);
    return (this->*start)(best, image, plan, taken);
  }
  // Whether in ping-pong one group can hand over its sums while the other one multiplies: it has few registers for what
  // the sink reads, and for pairs. H200 (CUDA 13.0, 2026-11), half, 512, 1,024 and 2,048 tokens, microseconds without
  // and with turns: x += ... of 4096 x 14336 85, 176, 378 and 95, 191, 385; of 4096 x 4096 31, 60, 126 and 41, 68, 131;
  // but gates of 14336 x 4096 195, 374, 785 and 175, 352, 742.
  static constexpr bool kHandsOverSoon = outputs_per_store<P> == 1 && !Traits<typename P::Map>::reads_matrix;
  template <class Body, class Start>
  void consider(int image, Choice& best, Start& start) const {
    if constexpr (Body::has_any()) {
      const Choice other = cheapest<Body>(image);
      if (other.cost < best.cost) best = other, start = &ProductEngine::template start_tma<Body>;
    }
  }
  template <class Body>
  Status start_tma(const Choice& choice, int image, MatmulPlan* plan, bool& taken) const {
    typename Body::Maps maps;
    const auto make_maps = [&] {
      return Body::make_maps(ex_, p_, choice.tokens, choice.cluster == 1 && in_boxes<Body>(choice.tokens), maps);
    };
    if constexpr (Body::is_8bit) {  // otherwise they are decoded
      taken = choice.tokens != 0 && make_maps();
      if (plan != nullptr) plan->in_eight = taken;
      return taken ? start_gemm<Body>(choice, plan, 0, maps) : Status{};
    }
    if (choice.tokens == 0 || make_maps()) return start_gemm<Body>(choice, plan, 0, maps);
    // Stacked weights, of which some cannot be mapped, have other code without TMA. For single matrices that would be
    // too much code: only rows with stride 0 or more than 2^31 rows cannot be mapped.
    using Unmapped = GemmBody<P, T, 1, 128>;
    taken = weights_in_rows<P, T>;
    return taken ? start_gemm<Unmapped>(cheapest<Unmapped>(image), plan) : Status{};
  }
  // For weights in panels; -1 if their codes and scales are not in memory as panels require.
  int group_log2() const {
    const int log2 = group_log2_of(p_.template weights<0>(), p_.k);
    return log2 == group_log2_of(p_.template weights<P::matrices - 1>(), p_.k) ? log2 : -1;
  }
  template <class T>
  Status run_coded(int image, MatmulPlan* plan, bool& taken) const {
    KERNELS_TRY((has_code<CodedGemmBody<P, T, 128>>(ex_, taken)));
    const int log2 = group_log2();
    taken = taken && log2 >= 0 && p_.k > 0;
    if (!taken) return {};
    using Body = CodedGemmBody<P, T, 128>;
    using WideBody = CodedGemmBody<P, T, 256>;
    const Choice narrow = cheapest<Body>(image), wide = cheapest<WideBody>(image);
    // The two tiles add up in different orders.
    if (policy_.batch_invariant && narrow.tokens == 0)
      return unsupported("matmul: batch_invariant goes with tiles of 32 or 64 tokens x 128 of these weights");
    if (!policy_.batch_invariant && wide.cost < narrow.cost) return start_coded<WideBody>(wide, plan, log2, taken);
    return start_coded<Body>(narrow, plan, log2, taken);
  }
  template <class Body>
  Status start_coded(const Choice& choice, MatmulPlan* plan, int group_log2, bool& taken) const {
    taken = choice.tokens != 0;
    if (!taken) return {};
    typename Body::Maps maps;
    if (plan == nullptr) Body::make_maps(ex_, p_, choice.tokens, maps);
    return start_gemm<Body>(choice, plan, group_log2, maps);
  }
  // The same without wgmma.
  template <class T>
  Status run_coded_mma(int image, MatmulPlan* plan, bool& taken) const {
    if constexpr (CodesInMemory<Gate>::value) {
      using Body = GemmBody<P, T, kCodedWeights, 128>;
      KERNELS_TRY((has_code<Body>(ex_, taken)));
      taken = taken && copies_codes();
      if (taken) return start_gemm<Body>(cheapest<Body>(image), plan, group_log2());
    }
    return {};
  }
  // Whether cp.async can copy whole chunks of codes, and words of scales.
  bool copies_codes() const {
    const int log2 = group_log2();
    return p_.k > 0 && p_.k % Coded<W>::pack == 0 && log2 >= 0 && scales_in_words(p_.template weights<0>(), log2) &&
           scales_in_words(p_.template weights<P::matrices - 1>(), log2);
  }
  // more: further parameters of the body, such as the tensor maps of its operands.
  template <class Body, class... More>
  Status start_gemm(const Choice& choice, MatmulPlan* plan, int group_log2 = 0, const More&... more) const {
    if (choice.tokens == 0)
      return unsupported(
          "matmul: the gemm path has no such tile for these operands and the shared memory of this device");
    if (plan != nullptr) {
      plan->tile_tokens = choice.tokens, plan->tile_rows = Body::kRows, plan->tiles_at_once = Body::kTilesAtOnce;
      plan->splits = choice.cluster;
      plan->weights_copied = Body::weights_copied;
      if constexpr (Body::weights_by_tma) plan->results_by_tma = Body::in_boxes(more...);
      return {};
    }
    const int64_t tokens = token_tiles(p_, choice.tokens), outputs = output_tiles<Body>();
    const GemmParams<P> params{
        p_,         {tokens, outputs}, choice.tokens, takes_packs_of_8(), policy_.weights_ready, choice.ring.few,
        group_log2, policy_.fast_sums};
    Launch how;
    how.cluster = choice.cluster;
    how.shared = size_t(choice.ring.bytes);
    const int64_t all = tokens * outputs;
    if constexpr (Body::weights_by_tma) {
      const int64_t at_a_time = Body::is_persistent(more...) ? lesser<int64_t>(all, ex_.device().sm_count) : all;
      return start_tiles<Body>(how, all > INT32_MAX ? all : at_a_time * choice.cluster,
                               {params, more..., unsigned(all)});
    } else {
      return start_tiles<Body>(how, all * choice.cluster, {params, more...});
    }
  }

  Status run_simt() const {
    if constexpr (!by_token<W> && !narrow_weights) return run_tiles();
    else return unsupported("matmul: no simt path for these weights");
  }
  Status run_tiles() const {
    if (lesser(pack_w_, pack_x_) >= simt_pack && p_.k % simt_pack == 0) return start_simt<simt_pack>();
    return start_simt<1>();
  }
  template <int kWidth>
  Status start_simt() const {
    if constexpr (sizeof(C) == 4) {
      if (waves_of_simt<128>() <= waves_of_simt<64>()) return start_simt_tiles<SimtGemmBody<P, kWidth, 128>>();
    }
    return start_simt_tiles<SimtGemmBody<P, kWidth, 64>>();
  }
  // The time of tiles, in waves of those of 128 x 128.
  template <int kTile>
  double waves_of_simt() const {
    const int64_t sms = ex_.device().sm_count, blocks = tiles<SimtGemmBody<P, 1, kTile>>(kTile);
    return double((blocks + sms - 1) / sms) * (kTile == 64 ? tuning::kCostOfSmallTile : 1);
  }
  template <class Body>
  Status start_simt_tiles() const {
    const int64_t tokens = token_tiles(p_, Body::kTokens);
    return start_tiles<Body>(Launch{}, tiles<Body>(Body::kTokens), {p_, tokens});
  }

  template <class Body>
  Status start_tiles(Launch how, int64_t blocks, const typename Body::Params& params) const {
    if (blocks > INT32_MAX) return unsupported("matmul: M x N has more than 2^31 tiles");
    how.threads = Body::max_threads;
    how.grid.x = unsigned(blocks);
    return launch<Body>(ex_, how, params);
  }

  const Exec& ex_;
  const P& p_;
  MatmulPolicy policy_;
  int pack_x_, pack_w_;
};

// Calls f(engine), unless there is nothing to do.
template <Path kOnly, class X, class W, class Out, class F>
Status with_product(const Exec& ex, const X& x, const W& w, const Out& out, const MatmulShape& shape,
                    const Groups& groups, const MatmulPolicy& policy, const F& f) {
  if constexpr (!takes_product<X, W, Out>()) {
    return not_compiled();
  } else {
    bool empty = false;
    KERNELS_TRY(check_matmul(x, w, out, shape, empty, groups));
    if (empty) return {};
    const auto inputs = cached(x);  // every block reads them
    using Problem = ProductProblem<std::decay_t<decltype(inputs)>, W, Out>;
    const Problem problem{inputs, w, out, shape.m, shape.n, shape.k, groups};
    return f(ProductEngine<Problem, kOnly>(ex, problem, policy));
  }
}

}  // namespace detail

KERNELS_END
