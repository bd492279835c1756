// Stores lists of numbers, and assigns an index to each list. Equal lists are stored only once.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "compile/automata/hash_index.h"
#include "compile/automata/numbers.h"

namespace dlm::compile {

class Lists {
 public:
  // Returns the index of the list. Adds the list if the list is new.
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
  // Returns a pointer to the first element of a list, and a pointer to the end of the list.
  std::pair<const int32_t*, const int32_t*> list(int32_t number) const {
    return {content_.data() + starts_[index(number)], content_.data() + starts_[index(number) + 1]};
  }
  int32_t size() const { return static_cast<int32_t>(starts_.size()) - 1; }
  size_t elements() const { return content_.size(); }  // returns the total number of elements

 private:
  std::vector<int32_t> content_;
  // List n consists of content_[starts_[n]] to content_[starts_[n + 1] - 1].
  std::vector<size_t> starts_{0};
  HashIndex index_;
};

}  // namespace dlm::compile
