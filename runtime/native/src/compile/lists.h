// Stores lists of numbers. Equal lists are stored once.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "compile/hash_index.h"
#include "compile/numbers.h"

namespace dlm::compile {

class Lists {
 public:
  // Returns the number of the list; adds the list if it is new.
  int32_t number_of(const std::vector<int32_t>& list) {
    uint64_t hash = list.size();
    for (const int32_t each : list) hash = mixed(hash, static_cast<uint64_t>(each));
    const int32_t known = index_.find(hash, [&](int32_t number) {
      const auto [first, end] = this->list(number);
      return std::equal(list.begin(), list.end(), first, end);
    });
    if (known >= 0) return known;
    const int32_t number = size();
    index_.add(hash, number);
    content_.insert(content_.end(), list.begin(), list.end());
    starts_.push_back(content_.size());
    return number;
  }
  // Returns the first element of a list, and the end.
  std::pair<const int32_t*, const int32_t*> list(int32_t number) const {
    return {content_.data() + starts_[index(number)], content_.data() + starts_[index(number) + 1]};
  }
  int32_t size() const { return static_cast<int32_t>(starts_.size()) - 1; }
  size_t elements() const { return content_.size(); }  // of all lists

 private:
  std::vector<int32_t> content_;
  std::vector<size_t> starts_{0};  // list n is content_[starts_[n], starts_[n + 1])
  HashIndex index_;
};

}  // namespace dlm::compile
