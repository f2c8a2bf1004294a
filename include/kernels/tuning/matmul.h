// Tuning of products: up to how many tokens each kernel is taken. Not yet measured.
#pragma once

#include "../core/macros.h"

KERNELS_BEGIN
namespace tuning {

constexpr int kGemvTokens = 4;
constexpr int kSkinnyTokens = 32;

}  // namespace tuning
KERNELS_END
