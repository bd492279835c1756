// Finds the recursive references of a document, and chooses the targets to count so that no schema
// contains itself more often than allowed.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "compile/budget.h"
#include "compile/schema/document.h"

namespace dlm::compile::schema {

constexpr uint32_t kNotCounted = UINT32_MAX;

class Recursion {
 public:
  Recursion(Document& document, Budget& budget);

  // Chooses the targets to count. By default, these are all targets in cycles. If a cycle has too
  // many of them for `max_depth`, only enough targets to break the cycle are counted. If these are
  // still too many, they share one number.
  void count(uint32_t max_depth);

  // Returns the number of a counted target, otherwise kNotCounted.
  uint32_t number(const json::Value& target) const;
  // Returns the numbers of the targets that references below a value reach, directly or through
  // other references. Ascending.
  const std::vector<uint32_t>& below(const json::Value& value);

 private:
  uint32_t vertex(const json::Value& target);
  void find_components();

  Document& document_;
  Budget& budget_;
  std::unordered_map<const json::Value*, uint32_t> vertices_;
  std::vector<const json::Value*> targets_;
  std::vector<std::vector<uint32_t>> edges_;
  std::vector<uint32_t> component_;  // in reverse topological order
  std::vector<uint8_t> is_cyclic_;   // the vertex is within a cycle
  std::vector<uint8_t> is_head_;     // a back edge of the depth-first search leads to it
  uint32_t components_ = 0;
  std::vector<uint32_t> numbers_;               // by vertex
  std::vector<std::vector<uint32_t>> reached_;  // by component: the numbers that it reaches
  std::unordered_map<const json::Value*, std::vector<uint32_t>> below_;
};

}  // namespace dlm::compile::schema
