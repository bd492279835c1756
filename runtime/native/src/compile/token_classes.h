// Divides the tokens into classes, so that the tokens of a class are in the same groups. Writes
// groups as lists of classes.
#pragma once

#include <cstdint>
#include <vector>

#include "compile/budget.h"
#include "compile/lists.h"
#include "compile/token_walks.h"
#include "constraints/automaton.h"

namespace dlm::compile {

// A partition of the numbers 0 to n - 1 (the members), which can be refined. At first, all members
// are in part 0. After calls of split(), part 0 contains the members that were in no set.
class Partition {
 public:
  explicit Partition(int32_t count) : part_of_(static_cast<size_t>(count), 0), sizes_{count} {}

  // Splits each part into the members inside a set and the members outside of the set. each(see)
  // must call see(member) for each member of the set, in any order. split() calls `each` twice.
  template <class Each>
  void split(const Each& each);
  int32_t part(int32_t member) const { return part_of_[static_cast<size_t>(member)]; }
  int32_t parts() const { return static_cast<int32_t>(sizes_.size()); }

 private:
  struct Mark {
    int32_t round, count, fresh;  // fresh: the new part, which gets the members in the set
  };
  std::vector<int32_t> part_of_, sizes_;
  std::vector<Mark> marks_{{-1, 0, -1}};
  int32_t round_ = 0;
};

// Both arguments must outlive this object.
class TokenClasses {
 public:
  TokenClasses(const TokenGroups& groups, Budget& budget) : groups_(groups), budget_(budget) {}

  // Fills token_class, group_starts and group_classes of an automaton that has no states yet.
  // `groups` must not contain duplicates. Returns the index of each group in the automaton. Groups
  // with the same tokens get the same index. Classes are sorted by their lowest token.
  std::vector<int32_t> name(const std::vector<int32_t>& groups, Automaton& out);

 private:
  std::vector<uint8_t> needed_for(const std::vector<int32_t>& groups) const;
  Partition split_nodes(const std::vector<uint8_t>& is_needed);
  Partition split_tokens(const Partition& nodes, int32_t vocab_size);
  std::vector<int32_t> list_parts(const std::vector<uint8_t>& is_needed, const Partition& nodes,
                                  Lists& lists);

  const TokenGroups& groups_;
  Budget& budget_;
  // The tokens of each part of nodes, and the parts of tokens in each part of nodes.
  std::vector<size_t> node_starts_;
  std::vector<int32_t> node_tokens_;
  std::vector<std::vector<int32_t>> token_parts_;
};

}  // namespace dlm::compile
