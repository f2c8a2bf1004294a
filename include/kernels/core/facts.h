// Facts: a cache of values that are computed once and read by many threads at the same time, without a lock.
#pragma once

#include <atomic>

#include "macros.h"

KERNELS_BEGIN
namespace detail {

// A list that only grows, for few keys: kernels times devices. Threads that miss a key at the same time each find the
// value themselves; the first one stored wins. Entries are never freed, as threads may still read them while a program
// ends.
template <class Key, class Fact>
class Facts {
 public:
  constexpr Facts() = default;
  Facts(const Facts&) = delete;
  Facts& operator=(const Facts&) = delete;

  // Null: there is no entry for the key.
  const Fact* find(const Key& key) const { return find_from(first_.load(std::memory_order_acquire), key); }

  // Stores a value, and returns the stored one: this, or another thread's earlier one.
  const Fact& keep(const Key& key, const Fact& fact) {
    Entry* const added = new Entry{key, fact, first_.load(std::memory_order_acquire)};
    do {
      if (const Fact* before = find_from(added->next, key)) {
        delete added;
        return *before;
      }
    } while (!first_.compare_exchange_weak(added->next, added, std::memory_order_release, std::memory_order_acquire));
    return added->fact;
  }

 private:
  struct Entry {
    Key key;
    Fact fact;
    Entry* next;
  };
  static const Fact* find_from(const Entry* entry, const Key& key) {
    for (; entry != nullptr; entry = entry->next) {
      if (entry->key == key) return &entry->fact;
    }
    return nullptr;
  }

  std::atomic<Entry*> first_{nullptr};
};

}  // namespace detail
KERNELS_END
