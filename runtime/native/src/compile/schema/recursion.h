// Which references of a document are recursive, and which of their targets have to be counted so
// that no schema contains itself more than a number of times.
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

  // Chooses what is counted: all targets within cycles. If a cycle has too many for `max_depth`,
  // only enough of them to break it; if there are still too many, these have one number together.
  void count(uint32_t max_depth);

  // The number of a target that is counted, else kNotCounted.
  uint32_t number(const json::Value& target) const;
  // The numbers that references below a value lead to, directly or through others; ascending.
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
  std::vector<uint8_t> is_head_;     // an edge of the depth-first search goes back to it
  uint32_t components_ = 0;
  std::vector<uint32_t> numbers_;               // of vertices
  std::vector<std::vector<uint32_t>> reached_;  // numbers that a component reaches
  std::unordered_map<const json::Value*, std::vector<uint32_t>> below_;
};

}  // namespace dlm::compile::schema
