// Products of activations with weights: result(m, n) = sum over k of x(m, k) * w(n, k), fused with whatever stands before and
// after.
//
//   k::matmul(stream, k::load(x, K), k::load(w, K), k::bias(b) | k::gelu() | k::store(y, N), {M, N, K});
//
// x has a row for each token, w one for each output; both are read along K. Any M, N, K up to 2^30, any stride, any alignment.
// Sources of weights, gates and normalized inputs: weights.h. Sums are made in float (double when x is).
//
// Up to 4 tokens, and for float and double weights, everything is computed in float. From 5 tokens on weights of 16 bits or
// fewer go through tensor cores: inputs are then rounded to the weights' 16-bit type (to half where they have none).
// Nothing is allocated or synchronized: calls can be captured in a graph. The same input gives the same bits.
//
// Unfinished: this compiles, but has not been run on a GPU.
#pragma once

#include "detail/gemm.cuh"
#include "detail/gemm_simt.cuh"
#include "exec.cuh"
#include "tuning/matmul.h"

KERNELS_BEGIN

// Which kernel makes a product.
enum class Path {
  automatic,
  gemv,    // CUDA cores, weights read once by every 4 tokens
  skinny,  // tensor cores, no shared memory; 16-bit weights
  gemm,    // tensor cores, tiles
  simt,    // CUDA cores, tiles
};

struct MatmulPolicy {
  Path path = Path::automatic;
};

namespace detail {

template <class P>
class ProductEngine {
 public:
  using X = typename P::X;
  using W = typename P::W;
  using C = typename P::C;
  static constexpr int wide = widest_of<W>(), wide_x = widest_of<X>();
  // Whether tensor cores may stand in: nothing that they would round but the inputs.
  static constexpr bool narrow_weights = std::is_same<C, float>::value && wide >= 8 && !by_token<W>;
  static constexpr bool has_skinny = !std::is_void<tensor_type<W>>::value && wide_x >= 8;

  ProductEngine(const Exec& ex, const P& problem) : ex_(ex), p_(problem), pack_x_(max_pack_of(problem.x)), pack_w_(max_pack_of(problem.w)) {}

  Status plan(const MatmulPolicy& asked, Path& path) const {
    KERNELS_TRY(ex_.status());
    path = asked.path;
    if (path == Path::automatic) {
      if (p_.groups.several()) path = narrow_weights ? Path::gemm : Path::simt;
      else if (by_token<W> || p_.m <= tuning::kGemvTokens) path = Path::gemv;
      else if (has_skinny && p_.m <= tuning::kSkinnyTokens && skinny_fits()) path = Path::skinny;
      else path = narrow_weights ? Path::gemm : Path::simt;
    }
    if (path == Path::skinny && !(has_skinny && skinny_fits())) return unsupported("matmul: the skinny path needs 16-bit weights, and rows of both operands at multiples of 16 bytes");
    if (p_.groups.several() && path != Path::gemm && path != Path::simt) return unsupported("matmul: groups go with the gemm and simt paths");
    if (by_token<W> && (path != Path::gemv || p_.groups.several())) return unsupported("matmul: weights that differ from token to token go with the gemv path, without groups");
    if (path == Path::gemm && !narrow_weights) return unsupported("matmul: tensor cores would round these weights");
    return {};
  }

  Status run(Path path) const {
    switch (path) {
      case Path::gemv: return run_gemv();
      case Path::skinny: return run_skinny();
      case Path::gemm: return run_gemm();
      case Path::simt: return run_simt();
      case Path::automatic: break;
    }
    return unsupported("matmul: no such path");
  }

 private:
  bool skinny_fits() const { return pack_x_ >= 8 && pack_w_ >= 8 && p_.k % 8 == 0; }

  Status run_gemv() const {
    if (wide > 1 && lesser(pack_w_, pack_x_ < wide_x ? pack_x_ : wide) >= wide && p_.k % wide == 0) return gemv_of<wide>();
    return gemv_of<1>();
  }
  template <int N>
  Status gemv_of() const {
    constexpr int U = N == 1 ? 4 : P::matrices == 2 ? 1 : 2;
    if (by_token<W> || p_.m == 1) return start_gemv<GemvBody<P, N, 4, 1, U>>(N, 4, 1);
    if constexpr (!by_token<W>) {
      if (p_.m == 2) return start_gemv<GemvBody<P, N, 4, 2, U>>(N, 4, 2);
      return start_gemv<GemvBody<P, N, 2, 4, U>>(N, 2, 4);
    }
    return {};
  }
  template <class Body>
  Status start_gemv(int pack, int rows, int tokens) const {
    const int64_t packs = (p_.k + pack - 1) / pack;
    Launch how;
    how.threads = packs <= 256 ? 64 : packs <= 1024 ? 128 : 256;
    return start<Body>(how, rows, tokens, {p_});
  }

  Status run_skinny() const {
    if constexpr (has_skinny) {
      if (p_.m <= 8) return start_skinny<SkinnyBody<P, 8>>(8);
      if (p_.m <= 16) return start_skinny<SkinnyBody<P, 16>>(16);
      return start_skinny<SkinnyBody<P, 32>>(32);
    }
    return unsupported("matmul: no skinny path for these weights");
  }
  template <class Body>
  Status start_skinny(int tokens) const {
    Launch how;
    how.threads = p_.k >= 2048 ? 256 : 128;
    how.shared = size_t(how.threads / 32) * P::matrices * Body::kRows * tokens * sizeof(float);
    return start<Body>(how, Body::kRows, tokens, {p_});
  }

  // A block for so many outputs and tokens: outputs along x, tokens along y.
  template <class Body>
  Status start(Launch how, int rows, int tokens, const typename Body::Params& params) const {
    const int64_t token_tiles = (p_.m + tokens - 1) / tokens;
    if (token_tiles > 65535) return unsupported("matmul: M is too large for this path");
    how.grid = dim3(unsigned((p_.n + rows - 1) / rows), unsigned(token_tiles), 1);
    return launch<Body>(ex_, how, params);
  }

  Status run_gemm() const {
    if constexpr (narrow_weights) {
      using Of16 = std::conditional_t<std::is_void<tensor_type<W>>::value, tensor_type<X>, tensor_type<W>>;
      using T = std::conditional_t<std::is_void<Of16>::value, half, Of16>;
      constexpr bool copied = std::is_same<tensor_type<X>, T>::value && std::is_same<tensor_type<W>, T>::value;
      if constexpr (wide_x >= 8) {
        if (pack_x_ >= 8 && pack_w_ >= 8 && (copied || p_.k % 8 == 0)) {
          if (p_.m <= 64) return start_gemm<GemmBody<P, T, 8, 64, 128>>();
          if constexpr (copied) {
            using Body = GemmBody<P, T, 8, 128, 256>;
            if (token_tiles(p_, Body::kTokens) * output_tiles<Body>() >= ex_.device().sm_count) return start_gemm<Body>();
          }
          return start_gemm<GemmBody<P, T, 8, 128, 128>>();
        }
      }
      return start_gemm<GemmBody<P, T, 1, 64, 128>>();
    }
    return unsupported("matmul: no tensor-core path for these weights");
  }
  template <class Body>
  int64_t output_tiles() const { return (p_.n + Body::kOutputs - 1) / Body::kOutputs; }
  template <class Body>
  Status start_gemm() const {
    int image = 0;
    KERNELS_TRY(image_architecture<Body>(image));
    const int64_t tokens = token_tiles(p_, Body::kTokens), outputs = output_tiles<Body>(), steps = (p_.k + Body::kStep - 1) / Body::kStep;
    // Blocks share K as long as all of them have room and enough to do.
    const int64_t room = ex_.device().sm_count * (Body::kRows > 128 ? 1 : 2);
    Launch how;
    if (image >= 90) {
      while (how.cluster < kPortableCluster && tokens * outputs * how.cluster * 2 <= room && steps >= how.cluster * 16) how.cluster *= 2;
    }
    how.shared = Body::shared_bytes(image);
    return start_tiles<Body>(how, tokens, outputs, {p_, tokens, outputs, p_.n % 8 == 0 && max_pack_of(p_.out) >= 8});
  }

  Status run_simt() const {
    if constexpr (by_token<W>) return unsupported("matmul: no tiles for weights that differ from token to token");
    else if constexpr (narrow_weights) return unsupported("matmul: tensor cores make tiles of these weights: use the gemm path");
    else return run_tiles();
  }
  Status run_tiles() const {
    constexpr int width = wide < 4 ? wide : 4;
    constexpr int both = width < wide_x ? width : wide_x;
    if (lesser(pack_w_, pack_x_) >= both && p_.k % both == 0) return start_simt<SimtGemmBody<P, both>>();
    return start_simt<SimtGemmBody<P, 1>>();
  }
  template <class Body>
  Status start_simt() const {
    const int64_t tokens = token_tiles(p_, Body::kTokens), outputs = (p_.n + Body::kOutputs - 1) / Body::kOutputs;
    return start_tiles<Body>(Launch{}, tokens, outputs, {p_, tokens});
  }

  template <class Body>
  Status start_tiles(Launch how, int64_t tokens, int64_t outputs, const typename Body::Params& params) const {
    if (tokens * outputs > std::numeric_limits<int32_t>::max() / how.cluster) return unsupported("matmul: M x N has more than 2^31 tiles");
    how.threads = Body::max_threads;
    how.grid.x = unsigned(tokens * outputs * how.cluster);
    return launch<Body>(ex_, how, params);
  }

  const Exec& ex_;
  const P& p_;
  int pack_x_, pack_w_;
};

}  // namespace detail

template <class X, class W, class Out>
Status matmul(const Exec& ex, const X& x, const W& w, const Out& out, const MatmulShape& shape, const Groups& groups, const MatmulPolicy& policy = {}) {
  bool empty = false;
  KERNELS_TRY(detail::check_matmul(x, w, out, shape, empty, groups));
  if (empty) return {};
  using Problem = detail::ProductProblem<X, W, Out>;
  const Problem problem{x, w, out, shape.m, shape.n, shape.k, groups};
  const detail::ProductEngine<Problem> engine(ex, problem);
  Path path;
  KERNELS_TRY(engine.plan(policy, path));
  return engine.run(path);
}
template <class X, class W, class Out>
Status matmul(const Exec& ex, const X& x, const W& w, const Out& out, const MatmulShape& shape, const MatmulPolicy& policy = {}) {
  return matmul(ex, x, w, out, shape, Groups{}, policy);
}

KERNELS_END
