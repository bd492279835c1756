// Finds the recursive references of a schema, such as {"$ref": "#"}, so that their nesting can be
// limited.
//
// The targets of references form a graph. A target that is in a cycle of this graph can contain
// itself. The class Recursion chooses some of these targets as counted targets. For each counted
// target, the writer (writer.h) counts how many of the containers around the current value are
// values of this target. The writer does not allow more than `max_depth` such containers. Each
// counted target has a number.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "compile/automata/budget.h"
#include "compile/schema/document.h"

namespace dlm::compile::schema {

constexpr uint32_t kNotCounted = UINT32_MAX;

// Adds the numbers in `others` to `into`. Both lists are in ascending order.
void unite(std::vector<uint32_t>& into, const std::vector<uint32_t>& others);

class Recursion {
 public:
  Recursion(Document& document, Budget& budget);

  // Chooses the targets whose nesting depth the writer counts, and gives each of them a number.
  // Usually, these are all targets that are in a cycle. Targets that can contain each other form a
  // group. The writer has one counter for each counted target, and each combination of counter
  // values needs separate states. If a group would have too many combinations, the function counts
  // only some of its targets. These targets are enough to break all cycles of the group. If there
  // are still too many combinations, the counted targets of the group share one number.
  void count(uint32_t max_depth);

  // Returns the index of a target among the counted targets, or kNotCounted if the target is not
  // counted.
  uint32_t number(const json::Value& target) const;
  // Returns the numbers of the counted targets to which the references inside a value lead,
  // directly or through other references. The numbers are in ascending order.
  const std::vector<uint32_t>& below(const json::Value& value);

 private:
  uint32_t vertex(const json::Value& target);
  void find_components();

  Document& document_;
  Budget& budget_;
  std::unordered_map<const json::Value*, uint32_t> vertices_;
  std::vector<const json::Value*> targets_;
  std::vector<std::vector<uint32_t>> edges_;
  // For each vertex: the number of the component that contains the vertex. The components are
  // numbered in reverse topological order.
  std::vector<uint32_t> component_;
  std::vector<uint8_t> is_cyclic_;  // for each vertex: 1 if the vertex is in a cycle
  // For each vertex: 1 if the depth-first search has found an edge from a descendant of the vertex
  // back to the vertex.
  std::vector<uint8_t> is_head_;
  uint32_t components_ = 0;
  // For each vertex: the number of the counted target, or kNotCounted.
  std::vector<uint32_t> numbers_;
  // For each component: the numbers of the counted targets that can be reached from it.
  std::vector<std::vector<uint32_t>> reached_;
  std::unordered_map<const json::Value*, std::vector<uint32_t>> below_;
};

}  // namespace dlm::compile::schema
