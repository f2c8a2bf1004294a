// A step of one text in one launch: a persistent, warp-specialized kernel for all layers of a model and its head.
//
//   each block, one on each multiprocessor:
//     a producer of four warps     copies the block's rows of all products into a ring, one product after the other
//     eight consumer warps         multiply what is in the ring, and write the results
//
//   products           | qkv  |           | output | up        | down  | qkv ...
//   producer           =================================================== as far ahead as the ring has room
//   consumer warps     --n====---a-----.--====.----n==========.--=====.--n===
//                        n: normalize the row   a: attention   .: wait for the results of all blocks
//
// The time of a token is the time in which its weights come from memory, plus the time in which memory is idle because
// a product waits for the one before. Here memory is not idle: while consumers wait, the producer goes on with the
// weights of the next products, up to 190 KB on each multiprocessor, and, except for 4-bit weights, prefetches those
// after them into the L2.
//
// A tile is twice eight neighbouring rows of a product, of one matrix or of two. Block b has the tiles b, b + blocks,
// b + 2 blocks ... of a product; in the first product of a layer, blocks are counted from the other end. A stage of the
// ring holds kChunk bytes of each row of a tile. product.cuh says how stages are multiplied.
//
// Blocks exchange results without a barrier. A result is a 64-bit word in global memory; one half of it is a tag that
// says which product of which launch has made it, and a reader polls a word until it has the right tag. That is one way
// through the L2 and back, where a barrier would be three. A word is not overwritten too early: no block is more than a
// product ahead of those that still read, because a block that makes a new result has waited for results of all blocks
// that read the old one.
//
// The launch needs all of its blocks, as many as there are multiprocessors, to run at once. Nothing may run beside it
// that does not end by itself.
#include <cuda_runtime.h>

#include <vector>

#include <kernels/detail/tensor_map.cuh>

#include "walk/attention.cuh"
#include "walk/producer.cuh"

namespace llm {
namespace {

struct Worker : AttendingThread {
  const unsigned char* const ring;
  PipelineState at;
  int buffer = 0;
  float factor = 1;  // the norm's, applied to the sums of a product
  // Two values of the residual stream. In all layers this thread makes the same rows of the output and down products.
  float2 own = {0, 0};

  __device__ __forceinline__ Worker(const Params& params, Shared& s, const unsigned char* stages, unsigned char* in)
      : AttendingThread(params, s, in), ring(stages) {}

  // ---- products ----------------------------------------------------------------------------------------------------

  // Adds a stage's part of a tile to its sums. A warp takes 64 bytes of each row at a time.
  __device__ __forceinline__ void multiply(Product::Sums& sums, const unsigned char* stage, int bytes,
                                           const Product::Inputs& x) const {
    if (bytes == kChunk) {
      KERNELS_UNROLL
      for (int i = 0; i < kChunk / 64; i += kWarps) sums.add(stage, i + warp, x, g, t);
    } else {
#pragma unroll 1
      for (int i = warp; i < bytes / 64; i += kWarps) sums.add(stage, i, x, g, t);
    }
  }

  // Which two of the next results a thread makes, and what it needs for them.
  struct Made {
    bool any;
    TileRows rows;
    float bias[2], scale[2];
  };
  // For kSlots tiles from `tile` on, of which each of the first threads makes two results.
  __device__ __forceinline__ Made made_of(const Step& step, int tile) const {
    const int of_thread = tile + tid / kHalf * int(gridDim.x);
    Made made = {tid < kHalf * kSlots && of_thread < step.sizes.tiles, {}, {0, 0}, {1, 1}};
    if (made.any) made.rows = rows_of(w, step, of_thread), prepare(step, made);
    return made;
  }

  // The product of a step, whose inputs are in shared memory. made: what the thread needs for its first results.
  __device__ __forceinline__ void product(const Step& step, Made made) {
    begin_part();
    const int tiles = step.sizes.tiles, bytes = int(row_bytes(step.sizes.cols));
    int stages = step.count_of_tiles() * ((bytes + kChunk - 1) / kChunk);  // to come
    if (tid == 0) shared.soon_waiting = stages <= kRest;
    for (int tile = step.first_tile(); tile < tiles;) {
      for (int slot = 0; slot < kSlots && tile < tiles; ++slot, tile += gridDim.x) {
        Product::Sums sums;
        Product::Inputs x(inputs, step.sizes.cols, step.normed(), g, t);
        for (int begin = 0; begin < bytes; begin += kChunk) {
          arch::mbarrier_wait_in_block(&shared.full[at.stage], at.parity);
          multiply(sums, ring + at.stage * kStage, min(kChunk, bytes - begin), x);
          x.skip(kChunk / 64);
          if (--stages == kRest && tid == 0) shared.soon_waiting = true;
          __syncwarp();
          if (lane == 0) arch::mbarrier_arrive(&shared.empty[at.stage]);
          at.next(p.stages);
        }
        const float upper = sums.row(false, step.normed()), lower = sums.row(true, step.normed());
        if (t < 2) shared.sums[buffer][slot][warp][row_of_lanes(g) + kHalf * t] = t == 0 ? upper : lower;
      }
      sync();
      if (made.any) {
        float2 total = {0, 0};
        KERNELS_UNROLL
        for (int i = 0; i < kWarps; ++i) {
          const float* const some = &shared.sums[buffer][tid / kHalf][i][tid % kHalf];
          total.x += some[0], total.y += some[kHalf];
        }
        put(step, made.rows, total.x * (made.scale[0] * factor) + made.bias[0],
            total.y * (made.scale[1] * factor) + made.bias[1]);
      }
      buffer ^= 1;
      if (tile < tiles) made = made_of(step, tile);
    }
    ++tag;
  }

  // ---- inputs ------------------------------------------------------------------------------------------------------

  // How many of a thread's kCount columns, kStep apart from `first` on, are within the row.
  template <int kCount, int kStep>
  static __device__ __forceinline__ int count_of(int first, int cols) {
    return min(kCount, int(unsigned(max(cols - first, 0) + kStep - 1) / kStep));
  }

  // Calls some(count, the block's first column) for a thread's columns, which are kStep apart: eight at a time, and
  // four for the last four or fewer, because columns beyond the row take time, too.
  template <int kStep, class Some>
  static __device__ __forceinline__ void in_rounds(int cols, const Some& some) {
#pragma unroll 1
    for (int begin = 0; begin < cols;) {
      if (begin + 4 * kStep < cols)
        some(std::integral_constant<int, 8>{}, begin), begin += 8 * kStep;
      else
        some(std::integral_constant<int, 4>{}, begin), begin += 4 * kStep;
    }
  }

  // Writes x * gamma to the inputs. The factor of the norm is applied to the results instead.
  // embedded: x is the token's embedding.
  __device__ __forceinline__ void normalize(bool embedded, const float* gamma) {
    begin_part();
    constexpr int kStep = 2 * kThreads;
    const int cols = int(w.hidden);
    float squares = 0;
    in_rounds<kStep>(cols, [&](auto count, int begin) {
      squares += normalize_some<decltype(count)::value>(embedded, gamma, cols, begin + tid * 2);
    });
    KERNELS_UNROLL
    for (int distance = 16; distance > 0; distance /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, distance);
    if (lane == 0) shared.parts[warp] = squares;
    sync();
    squares = 0;
    KERNELS_UNROLL
    for (int i = 0; i < kWarps; ++i) squares += shared.parts[i];
    factor = rsqrtf(__fdividef(squares, float(cols)) + w.eps) / kShrink;
  }
  // The same for kCount times two columns from `first` on; returns the sum of their squares.
  template <int kCount>
  __device__ __forceinline__ float normalize_some(bool embedded, const float* gamma, int cols, int first) {
    constexpr int kStep = 2 * kThreads;
    const int here = count_of<kCount, kStep>(first, cols);
    uint32_t factors[kCount][2];
    KERNELS_UNROLL
    for (int i = 0; i < kCount; ++i) arch::begin_load_if(factors[i], gamma + first + i * kStep, i < here);
    Word words[kCount][2] = {};
    if (!embedded) {
      await(words, here, [&](int i) { return room.x + first + i * kStep; });
    } else {
      KERNELS_UNROLL
      for (int i = 0; i < kCount; ++i) {
        const float2 x = i < here ? embedding(first + i * kStep) : float2{0, 0};
        words[i][0] = word(x.x, tag), words[i][1] = word(x.y, tag);
      }
    }
    float scaled[kCount][2], squares = 0;
    KERNELS_UNROLL
    for (int i = 0; i < kCount; ++i) {
      KERNELS_UNROLL
      for (int j = 0; j < 2; ++j) {
        const float x = value(words[i][j]);
        squares += x * x;
        scaled[i][j] = x * (__uint_as_float(factors[i][j]) * kShrink);
      }
    }
    Product::put<kStep>(inputs, cols, first, here, scaled);
    return squares;
  }

  // Two columns of the token's embedding, `apart` columns apart.
  __device__ __forceinline__ float2 embedding(int column, int apart = 1) const {
    const Matrix& table = w.embedding;
    const int32_t id = p.tokens.ids[0];
    if (id < 0 || id >= table.rows) return {__int_as_float(0x7fc00000), __int_as_float(0x7fc00000)};
    const int64_t at = table.cols * id + column;
    const auto pair = [&](auto* words) {
      const float x = k::convert<float>(words[at]), y = k::convert<float>(words[at + apart]);
      return float2{x * w.embedding_scale, y * w.embedding_scale};
    };
    if (table.type == Type::f32) return pair(static_cast<const float*>(table.data));
    return pair(static_cast<const A*>(table.data));
  }

  // Inputs that are pairs of A already, when they are there.
  __device__ __forceinline__ void take(const Word* from, int cols) {
    begin_part();
    constexpr int kStep = 4 * kThreads;
    in_rounds<kStep>(cols,
                     [&](auto count, int begin) { take_some<decltype(count)::value>(from, cols, begin + tid * 4); });
    factor = 1;
    sync();
  }
  template <int kCount>
  __device__ __forceinline__ void take_some(const Word* from, int cols, int first) const {
    constexpr int kStep = 4 * kThreads;
    const int here = count_of<kCount, kStep>(first, cols);
    Word words[kCount][2];
    await(words, here, [&](int i) { return from + unsigned(first) / 2 + i * (kStep / 2); });
    Product::put_pairs<kStep>(inputs, cols, first, here, words);
  }

  // ---- what products become ----------------------------------------------------------------------------------------

  static __device__ __forceinline__ float scale_of(const Matrix& m, int64_t row) {
    if constexpr (kRowScales)
      return static_cast<const float*>(m.scales)[row];
    else
      return 1.f;
  }

  // Reads the biases and scales of two results before the results are made.
  __device__ __forceinline__ void prepare(const Step& step, Made& made) const {
    const int a = made.rows.first + tid % kHalf, b = made.rows.second + tid % kHalf;
    if (step.kind == Kind::qkv) {
      const QkvWeights& of = step.layer.qkv;
      const int which = made.rows.of_first;
      const float* const bias = which == kQueries ? of.q_bias : which == kKeys ? of.k_bias : of.v_bias;
      const Matrix& m = which == kQueries ? of.q : which == kKeys ? of.k : of.v;
      made.bias[0] = bias[a], made.bias[1] = bias[b];
      made.scale[0] = scale_of(m, a), made.scale[1] = scale_of(m, b);
    } else if (kRowScales && step.kind == Kind::up) {
      made.scale[0] = scale_of(step.layer.gate, a), made.scale[1] = scale_of(step.layer.up, b);
    } else if (kRowScales) {  // a head has none
      const Matrix& m = step.kind == Kind::output ? step.layer.output : step.layer.down;
      made.scale[0] = scale_of(m, a), made.scale[1] = scale_of(m, b);
    }
  }

  __device__ __forceinline__ void put(const Step& step, const TileRows& rows, float a, float b) {
    const int first = rows.first + tid % kHalf, second = rows.second + tid % kHalf;
    switch (step.kind) {
      case Kind::qkv:
        return put_qkv(step.layer, rows, a, b);
      case Kind::output:
      case Kind::down:  // x += the product
        own.x += a, own.y += b;
        arch::store_word(room.x + first, word(own.x, tag + 1));
        arch::store_word(room.x + second, word(own.y, tag + 1));
        if (step.last && w.head.data == nullptr) w.x[first] = own.x, w.x[second] = own.y;
        return;
      case Kind::up: {
        const float bent = 0.7978845608f * (a + 0.044715f * a * a * a);
        const float active = w.activation == Activation::silu ? a / (1 + __expf(-a)) : a / (1 + __expf(-2 * bent));
        return put_pair(room.h, first, active * b, tag + 1);
      }
      case Kind::head:
        if (first < w.vocabulary) w.logits[first] = a;
        if (second < w.vocabulary) w.logits[second] = b;
    }
  }

  // Queries, keys and values, rotated by the angles of the token's position, unless heads are normalized first.
  __device__ __forceinline__ void put_qkv(const WalkLayer& layer, const TileRows& rows, float a, float b) const {
    const int nq = int(w.shape.heads * w.shape.dim), nk = int(w.shape.kv_heads * w.shape.dim);
    const int which = rows.of_first, first = rows.first + tid % kHalf, second = rows.second + tid % kHalf;
    const bool raw = w.head_norms && which != kValues;  // attention normalizes and rotates these
    if (rows.angle >= 0 && !raw) {
      const int angle = rows.angle + tid % kHalf;
      const float c = shared.cosines[layer.rope][angle], s = shared.sines[layer.rope][angle];
      const float turned = a * c - b * s;
      b = b * c + a * s, a = turned;
    }
    if (which != kQueries && !raw) {  // rounded as in the cache
      const A key[2] = {k::convert<A>(a), k::convert<A>(b)};
      A* const to = static_cast<A*>(which == kKeys ? layer.keys : layer.values) + int64_t(slot_of(p, newest)) * nk;
      to[first] = key[0], to[second] = key[1];
      a = k::convert<float>(key[0]), b = k::convert<float>(key[1]);
    }
    Word* const to = room.qkv + (which == kQueries ? 0 : which == kKeys ? nq : nq + nk);
    arch::store_word(to + first, word(a, tag + 1));
    arch::store_word(to + second, word(b, tag + 1));
  }

  // ---- all of it ---------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void find_angles(int position) {
    for (int rope = 0; rope < 2; ++rope) {
      const Rope& by = w.ropes[rope];
      for (int i = tid; i < by.rotary_dim / 2; i += kThreads) {
        float sine, cosine;
        sincosf(float(position) * by.frequencies[i], &sine, &cosine);
        shared.sines[rope][i] = sine * by.amplitude, shared.cosines[rope][i] = cosine * by.amplitude;
      }
    }
    sync();
  }

  template <int kChunks>  // a head has this many chunks of 32 columns
  __device__ __forceinline__ void run() {
    arch::grid_dependency_pass();
    const unsigned launches = *room.launches, products = unsigned(5 * w.count);
    tag = launches * products;
    if (tid == 0) arch::add_released(room.begun, 1);
    keys = p.tokens.kept != nullptr ? p.tokens.kept[0] : p.tokens.lengths[0];
    const int position = p.tokens.positions[0], sinks = int(p.cache.sinks), around = int(p.cache.ring) - sinks;
    newest = p.cache.ring == 0 || position < sinks ? position : sinks + (position - sinks) % around;
    find_angles(position);
    const int mine = (blockIdx.x + tid / kHalf * gridDim.x) * kTile + tid % kHalf;
    if (tid < kHalf * kSlots && mine < w.hidden) own = embedding(mine, kHalf);
    LayerOnItsWay next;
    next.fetch(w, 0);
#pragma unroll 1
    for (int i = 0; i < Step::count(w); ++i) {
      WalkLayer& layer = shared.layers[i / 4 % 2];
      const Step step(p, i, layer);
      if (step.kind == Kind::qkv) {
        if (warp == 0) next.put(layer);
        sync();
        if (warp == 0) next.fetch(w, i / 4 + 1);
      }
      if (step.kind == Kind::output) {
        const Part part(p, layer, keys);
        if (part.is_there()) attend<kChunks>(layer, part);
        ++tag;
      }
      const Made made = made_of(step, step.first_tile());  // while the results of other blocks are on their way
      if (step.first_tile() < step.sizes.tiles) {
        if (step.normed())
          normalize(i == 0, step.kind == Kind::qkv  ? layer.attention_norm
                            : step.kind == Kind::up ? layer.mlp_norm
                                                    : w.last_norm);
        else
          take(step.kind == Kind::output ? room.o : room.h, step.sizes.cols);
      }
      product(step, made);
    }
    // When all blocks have read the number of launches, it is raised, so that the next launch has other tags.
    if (blockIdx.x == 0 && tid == 0) {
      while (arch::load_acquired(room.begun) != (launches + 1) * gridDim.x) {
      }
      *room.launches = launches + 1;
    }
  }
};

// The producer gives registers back, which the consumers take.
constexpr int kProducers = 32 * kCopiers;

template <int kChunks>
__global__ void __launch_bounds__(kThreads + kProducers, 1) walk_layers(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char memory[];  // aligned as declared, as it is the only shared memory
  unsigned char* const ring = memory;
  unsigned char* const inputs = ring + p.stages * kStage;
  Shared& shared = *reinterpret_cast<Shared*>(inputs + p.inputs);
  if (threadIdx.x == 0) {
    for (int i = 0; i < p.stages; ++i) {
      arch::mbarrier_init(&shared.full[i], 2 * kMaps);
      arch::mbarrier_init(&shared.empty[i], kWarps);
    }
    arch::mbarrier_init_fence();
    shared.soon_waiting = false;
  }
  __syncthreads();
  if (threadIdx.x >= kThreads) {
    arch::release_registers<56>();
    Producer(p, shared, arch::shared_address(ring)).run();
  } else {
    arch::claim_registers<224>();
    Worker(p, shared, ring, inputs).run<kChunks>();
  }
}

// ---- the call ------------------------------------------------------------------------------------------------------

struct Machine {
  int blocks = 0, shared = 0, capability = 0;
  double bytes_per_cycle = 0;  // of memory, by its data sheet
  Machine() {
    const k::Exec here;
    cudaFuncAttributes image;
    if (!here.status() || cudaFuncGetAttributes(&image, walk_layers<2>) != cudaSuccess) return;
    if (image.ptxVersion < 90) return;  // compiled for an architecture without TMA copies
    const k::DeviceInfo& device = here.device();
    blocks = device.sm_count, shared = device.shared_per_block, capability = device.capability;
    int kilohertz = 0;
    (void)cudaDeviceGetAttribute(&kilohertz, cudaDevAttrClockRate, device.device);
    if (kilohertz > 0) bytes_per_cycle = 1e6 * device.memory_gbs / kilohertz;
  }
};
const Machine& machine() {
  static const Machine one;
  return one;
}

// The number of sets, of up to kShared, into which query heads with the same keys are cut. A block has one set.
int64_t sets_that_share(const Walk& w) { return (w.shape.heads / w.shape.kv_heads + kShared - 1) / kShared; }
int input_bytes(const Walk& w) {
  const int64_t cols = w.shape.heads * w.shape.dim;
  const int64_t attention = kStatesAt + kWarps * kShared * (w.shape.dim + 2) * 4;
  const int64_t inputs = std::max({Product::bytes(int(w.hidden), true), Product::bytes(int(cols), false),
                                   Product::bytes(int(w.inner), false), attention});
  return int((inputs + 127) / 128 * 128);
}
int stages_of(const Walk& w) {
  const int64_t left = machine().shared - input_bytes(w) - int64_t(sizeof(Shared));
  return int(std::min<int64_t>(kMostStages, left / kStage));
}

size_t walk_bytes(const Walk& w) {
  const int64_t dim = w.shape.dim, whole = 2 * kBlock;
  const bool known = dim == 64 || dim == 128;
  const bool fits = machine().capability >= 90 && k::detail::tensor_map_encoder() != nullptr && known &&
                    w.shape.heads % w.shape.kv_heads == 0 &&
                    w.shape.kv_heads * sets_that_share(w) <= machine().blocks &&
                    w.hidden <= machine().blocks * kSlots * kTile && w.cache == Type::UNIT &&
                    (w.embedding.type == Type::UNIT || w.embedding.type == Type::f32) &&
                    (w.head.data == nullptr || kBits == 16) && w.hidden % whole == 0 && w.inner % whole == 0 &&
                    w.shape.heads * dim % whole == 0 && w.vocabulary < (1 << 27) && stages_of(w) > kInFlight;
  for (const Rope& rope : w.ropes) {
    if (rope.rotary_dim / 2 > kMostAngles || rope.rotary_dim % kTile != 0) return 0;
    if (w.head_norms && rope.frequencies != nullptr && rope.rotary_dim != dim) return 0;
  }
  return fits ? Room(w, nullptr, machine().blocks).bytes : 0;
}

// Makes the tensor maps of a matrix: a box is kHalf rows of kChunk bytes.
bool map_rows(const Matrix& m, arch::TensorMap* maps) {
  const int64_t bytes = row_bytes(m.cols);
  const k::Exec ex(cudaStream_t(nullptr));
  const k::detail::MappedRows codes{m.data, 1, 128, m.rows, bytes / 128, 1, bytes, 128, bytes * m.rows};
  if (!k::detail::make_tensor_map(ex, codes, kHalf, maps[0], kChunk / 128)) return false;
  const k::detail::MappedRows scales{m.scales, 1, bytes / 8, m.rows, 1, 1, bytes / 8, 0, 0};
  return !kGroupScales || k::detail::make_tensor_map(ex, scales, kHalf, maps[kMaps - 1]);
}

const char* begin(const Place& place, const Walk& w, const WalkLayer* layers) {
  std::vector<arch::TensorMap> maps(size_t(w.count * kMatrices + 1) * kMaps);
  arch::TensorMap* next = maps.data();
  const auto take = [&](const Matrix& m) {
    const bool made = map_rows(m, next);
    next += kMaps;
    return made;
  };
  for (int64_t i = 0; i < w.count; ++i) {
    const WalkLayer& l = layers[i];
    for (const Matrix* m : {&l.qkv.q, &l.qkv.k, &l.qkv.v, &l.output, &l.gate, &l.up, &l.down}) {
      if (!take(*m)) return "the driver does not map a matrix";
    }
  }
  if (w.head.data != nullptr && !take(w.head)) return "the driver does not map the head's matrix";
  const Room room(w, w.room, machine().blocks);
  const cudaError_t error = cudaMemcpyAsync(room.maps, maps.data(), maps.size() * sizeof(arch::TensorMap),
                                            cudaMemcpyHostToDevice, static_cast<cudaStream_t>(place.stream));
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

template <int kChunks>
cudaError_t launch(const Place& place, const Params& params) {
  static const cudaError_t allowed =
      cudaFuncSetAttribute(walk_layers<kChunks>, cudaFuncAttributeMaxDynamicSharedMemorySize, machine().shared);
  if (allowed != cudaSuccess) return allowed;
  cudaLaunchAttribute early;
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = place.early;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(machine().blocks)), config.blockDim = dim3(kThreads + kProducers);
  config.dynamicSmemBytes = size_t(params.stages * kStage + params.inputs) + sizeof(Shared);
  config.stream = static_cast<cudaStream_t>(place.stream);
  config.attrs = &early, config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, walk_layers<kChunks>, params);
}

Sizes sizes_of(int64_t rows, int64_t cols) {
  const int tiles = int((rows + kTile - 1) / kTile), blocks = machine().blocks;
  return {int(cols), tiles, tiles / blocks, tiles % blocks};
}

const char* walk(const Place& place, const Walk& w, const Tokens& tokens, const Cache& cache) {
  const double stages = double(machine().blocks) * kTile * (kChunk + (kGroupScales ? kChunk / 8 : 0));
  // If the driver does not say how fast memory is, nothing is prefetched.
  const unsigned pace = machine().bytes_per_cycle > 0 ? unsigned(stages / machine().bytes_per_cycle) : 0xffffffffu;
  const int64_t queries = w.shape.heads * w.shape.dim, keys = w.shape.kv_heads * w.shape.dim;
  const int64_t sets = w.shape.kv_heads * sets_that_share(w);
  const Params params{w,
                      tokens,
                      cache,
                      stages_of(w),
                      input_bytes(w),
                      pace,
                      {sizes_of(queries + 2 * keys, w.hidden), sizes_of(w.hidden, queries),
                       sizes_of(2 * w.inner, w.hidden), sizes_of(w.hidden, w.inner), sizes_of(w.vocabulary, w.hidden)},
                      int(w.shape.heads / w.shape.kv_heads),
                      int(machine().blocks / sets),
                      k::detail::Divisor(cache.page),
                      k::detail::Divisor(sets),
                      k::detail::Divisor(sets_that_share(w))};
  const cudaError_t error = w.shape.dim == 64 ? launch<2>(place, params) : launch<4>(place, params);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace

extern const WalkCalls CALLS;
const WalkCalls CALLS = {Type::WEIGHTS, walk_bytes, begin, walk};

}  // namespace llm
