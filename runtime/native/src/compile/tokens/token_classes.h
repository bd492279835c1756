// Divides the tokens into classes, so that all tokens of a class are in the same groups. Then
// converts each group to a list of classes.
#pragma once

#include <cstdint>
#include <vector>

#include "compile/automata/budget.h"
#include "compile/tokens/lists.h"
#include "compile/tokens/token_walks.h"
#include "constraints/automaton.h"

namespace dlm::compile {

// Divides the numbers from 0 to n - 1, which are called members, into parts. At first, all members
// are in part 0. Each call of split() makes the parts finer. After all calls, part 0 contains the
// members that were not in any set.
class Partition {
 public:
  explicit Partition(int32_t count) : part_of_(static_cast<size_t>(count), 0), sizes_{count} {}

  // Splits each part into the members inside a set and the members outside of the set. The caller
  // passes the set as a function: each(see) must call see(member) for each member of the set, in
  // any order. split() calls `each` twice.
  template <class Each>
  void split(const Each& each);
  int32_t part(int32_t member) const { return part_of_[static_cast<size_t>(member)]; }
  int32_t parts() const { return static_cast<int32_t>(sizes_.size()); }

 private:
  struct Mark {
    // `fresh` is the number of the new part, which gets the members inside the set.
    int32_t round, count, fresh;
  };
  std::vector<int32_t> part_of_, sizes_;
  std::vector<Mark> marks_{{-1, 0, -1}};
  int32_t round_ = 0;
};

// Divides tokens into classes. `groups` and `budget` must outlive this object.
class TokenClasses {
 public:
  TokenClasses(const TokenGroups& groups, Budget& budget) : groups_(groups), budget_(budget) {}

  // Fills token_class, group_starts and group_classes of `out`. `groups` lists the groups that the
  // automaton uses, without duplicates. Returns the index of each of these groups in the automaton.
  // Groups with the same tokens get the same index. Classes are sorted by their lowest token.
  std::vector<int32_t> name(const std::vector<int32_t>& groups, Automaton& out);

 private:
  std::vector<uint8_t> needed_for(const std::vector<int32_t>& groups) const;
  Partition split_nodes(const std::vector<uint8_t>& is_needed);
  Partition split_tokens(const Partition& nodes, int32_t vocab_size);
  std::vector<int32_t> list_parts(const std::vector<uint8_t>& is_needed, const Partition& nodes,
                                  Lists& lists);

  const TokenGroups& groups_;
  Budget& budget_;
  // For each part of the partition `nodes`: the tokens whose nodes are in this part, and the parts
  // of these tokens.
  std::vector<size_t> node_starts_;
  std::vector<int32_t> node_tokens_;
  std::vector<std::vector<int32_t>> token_parts_;
};

}  // namespace dlm::compile
