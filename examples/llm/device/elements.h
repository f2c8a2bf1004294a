// The library's element type for each Type.
#pragma once

#include <tuple>

#include <kernels/core/dtype.h>
#include <kernels/core/quant.h>

#include "device/ops.h"

#define TEXT2(a) #a
#define TEXT(a) TEXT2(a)

namespace llm {
namespace k = kernels;

namespace {  // the library's types differ between instruction sets

using Elements = std::tuple<float, k::half, k::bfloat16, k::float8_e4m3, int8_t, k::Int4>;  // in the order of Type
static_assert(std::tuple_size<Elements>::value == kTypes, "one for each");
template <Type kType>
using Element = std::tuple_element_t<size_t(kType), Elements>;

}  // namespace
}  // namespace llm
