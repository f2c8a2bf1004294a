// The types of the library that elements of a Type have: those of numbers, and of codes.
#pragma once

#include <kernels/core/dtype.h>
#include <kernels/core/quant.h>

#include "ops.h"

namespace llm {
namespace k = kernels;

namespace {  // the library's types are others for each instruction set

template <Type kType>
struct ElementOf;
template <>
struct ElementOf<Type::f32> {
  using type = float;
};
template <>
struct ElementOf<Type::f16> {
  using type = k::half;
};
template <>
struct ElementOf<Type::bf16> {
  using type = k::bfloat16;
};
template <>
struct ElementOf<Type::f8> {
  using type = k::float8_e4m3;
};
template <>
struct ElementOf<Type::i8> {
  using type = int8_t;
};
template <>
struct ElementOf<Type::i4> {
  using type = k::Int4;
};
template <Type kType>
using Element = typename ElementOf<kType>::type;

}  // namespace
}  // namespace llm
