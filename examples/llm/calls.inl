// What rows.inl and products.inl share. `on`, `A` and exec() come from cpu.cpp or gpu.cu.

#define LLM_TRY(call) \
  do { \
    if (const char* llm_why = (call)) return llm_why; \
  } while (false)

namespace {

const char* reason(const k::Status& status) { return status ? nullptr : status.reason(); }

k::Rope rope_of(const Tokens& tokens, const Heads& heads, const Rope& by) {
  return k::rope(tokens.positions, by.frequencies, int(heads.dim)).rotary_dim(by.rotary_dim).amplitude(by.amplitude);
}

template <Type kType>
struct ElementOf;
template <> struct ElementOf<Type::f32> { using type = float; };
template <> struct ElementOf<Type::f16> { using type = k::half; };
template <> struct ElementOf<Type::bf16> { using type = k::bfloat16; };
template <> struct ElementOf<Type::f8> { using type = k::float8_e4m3; };
template <Type kType>
using Element = typename ElementOf<kType>::type;

template <class T>
auto cache_of(const Cache& cache, const Heads& heads, const Tokens& tokens) {
  const auto pages = k::pages(cache.table, cache.pages, cache.page);
  return k::paged_kv(k::nhd(static_cast<T*>(cache.keys), cache.page, heads.kv_heads, heads.dim),
                     k::nhd(static_cast<T*>(cache.values), cache.page, heads.kv_heads, heads.dim), pages, tokens.lengths);
}

// f(view of the keys and values)
template <class F>
const char* with_cache(const Cache& cache, const Heads& heads, const Tokens& tokens, const F& f) {
  switch (cache.type) {
    case Type::f32: return f(cache_of<float>(cache, heads, tokens));
    case Type::f16: return f(cache_of<k::half>(cache, heads, tokens));
    case Type::bf16: return f(cache_of<k::bfloat16>(cache, heads, tokens));
    case Type::f8: return f(cache_of<k::float8_e4m3>(cache, heads, tokens));
    default: return "the cache is fp32, fp16, bf16 or fp8";
  }
}

}  // namespace
