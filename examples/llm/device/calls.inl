// What rows.inl, products.inl and attend.inl share. `on`, kActivations, kCaches, exec() and policy() come from cpu.cpp
// or gpu.cu.

namespace {

using A = Element<kActivations>;

[[maybe_unused]] const char* reason(const k::Status& status) { return status ? nullptr : status.reason(); }

[[maybe_unused]] k::Rope rope_of(const Tokens& tokens, const Heads& heads, const Rope& by) {
  return k::rope(tokens.positions, by.frequencies, int(heads.dim)).rotary_dim(by.rotary_dim).amplitude(by.amplitude);
}

[[maybe_unused]] k::AppendAt append_at(const Tokens& tokens, const Cache& cache) {
  const k::AppendAt at(tokens.positions, tokens.owners);
  return cache.ring > 0 ? at.ring(cache.ring, cache.sinks, tokens.lengths) : at;
}

template <class T>
auto cache_of(const Cache& cache, const Heads& heads, const Tokens& tokens) {
  const auto pages = k::pages(cache.table, cache.pages, cache.page);
  const auto side = [&](void* data, float* scales) {
    const auto tensor = k::nhd(static_cast<T*>(data), cache.page, heads.kv_heads, heads.dim);
    if constexpr (std::is_same<T, int8_t>::value) return tensor.scales(scales, cache.page * heads.kv_heads, heads.kv_heads, 1);
    else return (void)scales, tensor;
  };
  return k::paged_kv(side(cache.keys, cache.key_scales), side(cache.values, cache.value_scales), pages, tokens.kept != nullptr ? tokens.kept : tokens.lengths);
}

// f(a view of the keys and values), compiled for each type in kCaches.
template <size_t i = 0, class F>
const char* with_cache(const Cache& cache, const Heads& heads, const Tokens& tokens, const F& f) {
  if constexpr (i < sizeof(kCaches) / sizeof(Type)) {
    if (cache.type == kCaches[i]) return f(cache_of<Element<kCaches[i]>>(cache, heads, tokens));
    return with_cache<i + 1>(cache, heads, tokens, f);
  } else {
    return "this type of KV cache is not compiled in for this device";
  }
}

}  // namespace
