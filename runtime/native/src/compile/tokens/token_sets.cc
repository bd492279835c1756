#include "compile/tokens/token_sets.h"

#include <algorithm>

namespace dlm::compile {

TokenSets::TokenSets(const TokenTree& tree) : tree_(tree) {
  sets_.push_back({0, 0, 0, tree.size(), false, -1});
}

int32_t TokenSets::shape_of(const std::vector<Range>& ranges) {
  uint64_t hash = ranges.size();
  for (const auto& [low, high, part] : ranges)
    hash = mixed(hash, static_cast<uint64_t>(part) << 16 | static_cast<uint64_t>(high) << 8 | low);
  const int32_t known = shape_index_.find(hash, [&](int32_t number) {
    const Shape& shape = shapes_[index(number)];
    return shape.count == ranges.size() &&
           std::equal(ranges.begin(), ranges.end(), ranges_.data() + shape.first,
                      [](const Range& a, const Range& b) {
                        return a.low == b.low && a.high == b.high && a.part == b.part;
                      });
  });
  if (known >= 0) return known;
  int32_t parts = 0;
  for (const Range& range : ranges) parts = std::max(parts, range.part + 1);
  shapes_.push_back({ranges_.size(), ranges.size(), parts});
  ranges_.insert(ranges_.end(), ranges.begin(), ranges.end());
  const auto number = static_cast<int32_t>(shapes_.size()) - 1;
  shape_index_.add(hash, number);
  return number;
}

std::pair<size_t, size_t> TokenSets::children(int32_t set, int32_t shape, Budget& budget) {
  // Most calls request the same shape as the last call for this set.
  int32_t& last = sets_[index(set)].last;
  if (last >= 0 && opened_[index(last)].shape == shape)
    return {opened_[index(last)].first, opened_[index(last)].last};
  const uint64_t hash = mixed(index(shape), index(set));
  const int32_t known = opened_index_.find(hash, [&](int32_t number) {
    return opened_[index(number)].set == set && opened_[index(number)].shape == shape;
  });
  if (known >= 0) {
    last = known;
    return {opened_[index(known)].first, opened_[index(known)].last};
  }
  const auto [first_range, range_count, parts] = shapes_[index(shape)];
  const Range* const ranges = ranges_.data() + first_range;
  const Range* const ranges_end = ranges + range_count;
  if (found_.size() < index(parts)) found_.resize(index(parts));
  for (int32_t part = 0; part < parts; ++part) found_[index(part)].clear();
  const auto add_children = [&](int32_t child, int32_t end) {
    const Range* range = ranges;
    for (; child < end; child = tree_.behind[index(child)]) {
      budget.check();
      const uint8_t byte = tree_.bytes[index(child)];
      while (range != ranges_end && range->high < byte) ++range;
      if (range == ranges_end) break;
      if (range->low <= byte) found_[range->part].push_back(child);
    }
  };
  const Set opened = sets_[index(set)];
  if (set == kRoot) add_children(0, tree_.size());
  for (size_t i = opened.first; i < opened.first + opened.count; ++i)
    add_children(nodes_[i] + 1, tree_.behind[index(nodes_[i])]);
  const size_t first = children_.size();
  for (int32_t part = 0; part < parts; ++part)
    if (!found_[index(part)].empty())
      children_.push_back({part, set_of(found_[index(part)], opened.depth + 1)});
  opened_.push_back({set, shape, first, children_.size()});
  opened_index_.add(hash, static_cast<int32_t>(opened_.size()) - 1);
  return {first, children_.size()};
}

int32_t TokenSets::set_of(const std::vector<int32_t>& nodes, int32_t depth) {
  uint64_t hash = nodes.size();
  for (const int32_t node : nodes) hash = mixed(hash, index(node));
  const int32_t known = set_index_.find(hash, [&](int32_t number) {
    const Set& set = sets_[index(number)];
    return set.count == nodes.size() &&
           std::equal(nodes.begin(), nodes.end(), nodes_.data() + set.first);
  });
  if (known >= 0) return known;
  Set set{nodes_.size(), nodes.size(), depth, 0, false, -1};
  for (const int32_t node : nodes) {
    set.below += tree_.behind[index(node)] - node - 1;
    set.has_tokens |= tree_.token_starts[index(node)] < tree_.token_starts[index(node) + 1];
  }
  nodes_.insert(nodes_.end(), nodes.begin(), nodes.end());
  sets_.push_back(set);
  set_index_.add(hash, size() - 1);
  return size() - 1;
}

size_t TokenSets::bytes() const {
  return sets_.size() * sizeof(Set) + nodes_.size() * sizeof(int32_t) +
         ranges_.size() * sizeof(Range) + shapes_.size() * sizeof(Shape) +
         opened_.size() * sizeof(Opened) + children_.size() * sizeof(Child) + set_index_.bytes() +
         shape_index_.bytes() + opened_index_.bytes();
}

}  // namespace dlm::compile
