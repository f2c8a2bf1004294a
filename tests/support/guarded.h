// Guarded<T>: a matrix in the middle of its own allocation. Guard bytes stand before and after it, the gaps between its
// rows (row stride > cols) are guarded as well, and everything begins as poison.
//
//   Guarded<float> y(rows, cols, ld, /*shift*/ 1);   // begins one element past a 256-byte boundary
//   y.set(0, 3, 1.f); y.upload();                    // the host's copy; then to where kernels see it
//   run(y.data(), y.ld());
//   y.download(); CHECK(y.intact()); use(y.get(0, 3));
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

namespace test {

struct HostMemory {
  static void* allocate(size_t bytes) {
    void* p = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
    if (!p) throw std::bad_alloc();
    return p;
  }
  static void release(void* p) { std::free(p); }
  static void upload(void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); }
  static void download(void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); }
};

enum class Poison {
  garbage,  // other bytes everywhere: for what is written, so that a copied gap is noticed
  nan,      // all ones, a NaN in every type: for what is only read, so that a gap that is read is noticed
};

template <class T, class Memory = HostMemory>
class Guarded {
 public:
  static constexpr int64_t guard = 256;

  Guarded(int64_t rows, int64_t cols, int64_t ld, int64_t shift = 0, Poison poison = Poison::garbage)
      : rows_(rows), cols_(cols), ld_(ld), poison_(poison) {
    begin_ = guard + shift * int64_t(sizeof(T));
    const int64_t elements = rows > 0 ? (rows - 1) * ld + cols : 0;
    copy_.resize(static_cast<size_t>(begin_ + elements * int64_t(sizeof(T)) + guard));
    for (size_t i = 0; i < copy_.size(); ++i) copy_[i] = poisoned(i);
    live_ = static_cast<unsigned char*>(Memory::allocate(copy_.size()));
    upload();
  }
  ~Guarded() { Memory::release(live_); }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;

  T* data() const { return reinterpret_cast<T*>(live_ + begin_); }
  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }
  int64_t ld() const { return ld_; }

  // The host's copy.
  T get(int64_t row, int64_t col) const {
    T value;
    std::memcpy(static_cast<void*>(&value), copy_.data() + offset(row, col), sizeof(T));
    return value;
  }
  void set(int64_t row, int64_t col, T value) {
    std::memcpy(copy_.data() + offset(row, col), static_cast<const void*>(&value), sizeof(T));
  }

  // All of the host's copy, guards included.
  const std::vector<unsigned char>& bytes() const { return copy_; }

  // Makes the host's copy, and the memory, what bytes() has said.
  void restore(const std::vector<unsigned char>& bytes) { copy_ = bytes, upload(); }

  void upload() { Memory::upload(live_, copy_.data(), copy_.size()); }
  void download() { Memory::download(copy_.data(), live_, copy_.size()); }

  // Guards and gaps of the host's copy are as they were made.
  bool intact() const {
    size_t at = 0;
    for (int64_t row = 0; row < rows_; ++row) {
      if (!all_poison(at, offset(row, 0))) return false;
      at = offset(row, cols_);
    }
    return all_poison(at, copy_.size());
  }
  // The memory is what it was when last copied either way.
  bool unchanged() const {
    std::vector<unsigned char> now(copy_.size());
    Memory::download(now.data(), live_, now.size());
    return now == copy_;
  }

 private:
  size_t offset(int64_t row, int64_t col) const {
    return static_cast<size_t>(begin_ + (row * ld_ + col) * int64_t(sizeof(T)));
  }
  unsigned char poisoned(size_t i) const {
    return poison_ == Poison::nan ? 0xff : static_cast<unsigned char>(0xa5 ^ (i * 29 + (i >> 8)));
  }
  bool all_poison(size_t from, size_t to) const {
    for (size_t i = from; i < to; ++i) {
      if (copy_[i] != poisoned(i)) return false;
    }
    return true;
  }

  int64_t rows_, cols_, ld_, begin_;
  Poison poison_;
  std::vector<unsigned char> copy_;
  unsigned char* live_;
};

// A vector of given numbers.
template <class T, class Memory = HostMemory>
struct Numbers : Guarded<T, Memory> {
  explicit Numbers(const std::vector<T>& all)
      : Guarded<T, Memory>(1, int64_t(all.size()), int64_t(all.size()), 0, Poison::nan) {
    assign(all);
  }
  void assign(const std::vector<T>& all) {
    for (size_t i = 0; i < all.size(); ++i) this->set(0, int64_t(i), all[i]);
    this->upload();
  }
};

}  // namespace test
