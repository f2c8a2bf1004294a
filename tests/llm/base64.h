// Bytes in golden files.
#pragma once

#include <cstdint>
#include <string>

namespace golden {

inline std::string from_base64(const std::string& text) {
  const std::string letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string out;
  uint32_t bits = 0;
  int count = 0;
  for (const char c : text) {
    if (letters.find(c) == std::string::npos) continue;
    bits = bits << 6 | uint32_t(letters.find(c)), count += 6;
    if (count >= 8) out.push_back(char(bits >> (count -= 8) & 255));
  }
  return out;
}

}  // namespace golden
