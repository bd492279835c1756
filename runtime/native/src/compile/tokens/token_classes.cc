// Assigns classes to tokens. Two tokens get the same class if they are in the same groups.
//
// A group consists of items, and an item is a set of nodes in the token tree (token_sets.h). The
// code works in three steps. First, it divides the items into parts. Two items are in the same part
// if they are in the same groups. Then it divides the tokens into parts. Two tokens are in the same
// part if the items that contain them are in the same parts. These two steps are cheaper than
// visiting all tokens of all groups, because there are far fewer items than tokens. But they
// separate more tokens than necessary. So the last step joins the tokens that are in the same
// groups.
#include "compile/tokens/token_classes.h"

#include <algorithm>

#include "compile/automata/numbers.h"

namespace dlm::compile {
namespace {}  // namespace

template <class Each>
void Partition::split(const Each& each) {
  each([&](int32_t member) {
    Mark& mark = marks_[index(part_of_[index(member)])];
    if (mark.round != round_) mark = {round_, 0, kNone};
    ++mark.count;
  });
  each([&](int32_t member) {
    const int32_t from = part_of_[index(member)];
    Mark& mark = marks_[index(from)];
    if (mark.round != round_ || mark.fresh == from) return;
    if (mark.fresh < 0) {
      if (mark.count == sizes_[index(from)] && from != 0) {
        mark.fresh = from;
        return;
      }
      mark.fresh = static_cast<int32_t>(sizes_.size());
      sizes_[index(from)] -= mark.count;
      sizes_.push_back(mark.count);
      marks_.push_back({kNone, 0, kNone});
    }
    part_of_[index(member)] = marks_[index(from)].fresh;
  });
  ++round_;
}

// Returns one number for each group. The number is 1 if the group is in `groups`, or is a part of a
// group in `groups`. Otherwise it is 0.
std::vector<uint8_t> TokenClasses::needed_for(const std::vector<int32_t>& groups) const {
  std::vector<uint8_t> is_needed(index(groups_.size()), 0);
  for (const int32_t group : groups) is_needed[index(group)] = 1;
  for (int32_t group = groups_.size(); group-- > 0;)
    if (is_needed[index(group)])
      groups_.each_item(group, [&](int32_t item) {
        if (item < 0) is_needed[index(~item)] = 1;
      });
  return is_needed;
}

Partition TokenClasses::split_nodes(const std::vector<uint8_t>& is_needed) {
  Partition nodes(groups_.item_count());
  for (int32_t group = 0; group < groups_.size(); ++group) {
    budget_.check();
    if (!is_needed[index(group)]) continue;
    nodes.split([&](const auto& see) {
      groups_.each_item(group, [&](int32_t item) {
        if (item >= 0) see(item);
      });
    });
  }
  return nodes;
}

// Divides the tokens into parts. Tokens are in the same part if they belong to the same parts of
// `nodes`. For each part of `nodes`, the function also stores the tokens of this part
// (node_tokens_), and the resulting parts of these tokens (token_parts_).
Partition TokenClasses::split_tokens(const Partition& nodes, int32_t vocab_size) {
  node_starts_.assign(index(nodes.parts()) + 2, 0);
  // Calls see(part, first, last) at least once for each part of `nodes`. `first` and `last` point
  // to the start and the end of a list of tokens.
  const auto each_tokens = [&](auto see) {
    for (int32_t item = 0; item < groups_.item_count(); ++item)
      if (const int32_t part = nodes.part(item); part > 0)
        groups_.each_tokens(item, [&](const int32_t* first, const int32_t* last) {
          see(index(part), first, last);
        });
  };
  each_tokens([&](size_t part, const int32_t* first, const int32_t* last) {
    node_starts_[part + 2] += static_cast<size_t>(last - first);
  });
  for (size_t i = 2; i < node_starts_.size(); ++i) node_starts_[i] += node_starts_[i - 1];
  budget_.check_memory(node_starts_.back() * sizeof(int32_t));
  node_tokens_.resize(node_starts_.back());
  each_tokens([&](size_t part, const int32_t* first, const int32_t* last) {
    size_t& at = node_starts_[part + 1];
    std::copy(first, last, node_tokens_.begin() + static_cast<ptrdiff_t>(at));
    at += static_cast<size_t>(last - first);
  });
  const auto tokens_of = [&](int32_t part, const auto& see) {
    for (size_t i = node_starts_[index(part)]; i < node_starts_[index(part) + 1]; ++i)
      see(node_tokens_[i]);
  };
  Partition tokens(vocab_size);
  for (int32_t part = 1; part < nodes.parts(); ++part) {
    budget_.check();
    tokens.split([&](const auto& see) { tokens_of(part, see); });
  }
  std::vector<int32_t> seen(index(tokens.parts()), kNone);
  token_parts_.assign(index(nodes.parts()), {});
  for (int32_t part = 1; part < nodes.parts(); ++part) {
    budget_.check();
    tokens_of(part, [&](int32_t token) {
      const int32_t number = tokens.part(token);
      if (seen[index(number)] == part) return;
      seen[index(number)] = part;
      token_parts_[index(part)].push_back(number);
    });
  }
  return tokens;
}

// For each group with a 1 in `is_needed`, lists the parts of tokens that the group contains. Adds
// these lists to `lists`. Returns the index of each group's list.
std::vector<int32_t> TokenClasses::list_parts(const std::vector<uint8_t>& is_needed,
                                              const Partition& nodes, Lists& lists) {
  std::vector<int32_t> list_of(index(groups_.size()), kNone);
  std::vector<int32_t> node_seen(index(nodes.parts()), kNone), seen, parts;
  for (int32_t group = 0; group < groups_.size(); ++group) {
    budget_.check();
    if (!is_needed[index(group)]) continue;
    parts.clear();
    const auto add = [&](int32_t part) {
      if (index(part) >= seen.size()) seen.resize(index(part) + 1, kNone);
      if (seen[index(part)] == group) return;
      seen[index(part)] = group;
      parts.push_back(part);
    };
    groups_.each_item(group, [&](int32_t item) {
      if (item < 0) {
        const auto [first, last] = lists.list(list_of[index(~item)]);
        std::for_each(first, last, add);
      } else if (const int32_t part = nodes.part(item); node_seen[index(part)] != group) {
        node_seen[index(part)] = group;
        std::for_each(token_parts_[index(part)].begin(), token_parts_[index(part)].end(), add);
      }
    });
    std::sort(parts.begin(), parts.end());
    list_of[index(group)] = lists.number_of(parts);
    budget_.check_memory(lists.elements() * 2 * sizeof(int32_t));
  }
  return list_of;
}

std::vector<int32_t> TokenClasses::name(const std::vector<int32_t>& groups, Automaton& out) {
  const std::vector<uint8_t> is_needed = needed_for(groups);
  const Partition nodes = split_nodes(is_needed);
  const Partition tokens = split_tokens(nodes, out.vocab_size);
  Lists lists;
  const std::vector<int32_t> list_of = list_parts(is_needed, nodes, lists);

  // Assigns a number to each group in `groups`. Groups with the same list of parts get the same
  // number.
  std::vector<int32_t> number_of(index(lists.size()), kNone), numbers, used;
  for (const int32_t group : groups) {
    int32_t& number = number_of[index(list_of[index(group)])];
    if (number < 0) {
      number = out.groups++;
      used.push_back(list_of[index(group)]);
    }
    numbers.push_back(number);
  }
  Partition joined(tokens.parts());
  for (const int32_t each : used) {
    budget_.check();
    const auto [first, last] = lists.list(each);
    joined.split(
        [first = first, last = last](const auto& see) { std::for_each(first, last, see); });
  }

  out.token_class.assign(index(out.vocab_size), kNone);
  std::vector<int32_t> names(index(joined.parts()), kNone);
  for (int32_t token = 0; token < out.vocab_size; ++token) {
    const int32_t part = joined.part(tokens.part(token));
    if (part == 0) continue;
    int32_t& name = names[index(part)];
    if (name < 0) name = out.classes++;
    out.token_class[index(token)] = name;
  }
  std::vector<int32_t> classes;
  out.group_starts.push_back(0);
  for (const int32_t each : used) {
    budget_.check();
    const auto [first, last] = lists.list(each);
    classes.clear();
    for (const int32_t* part = first; part != last; ++part)
      classes.push_back(names[index(joined.part(*part))]);
    std::sort(classes.begin(), classes.end());
    classes.erase(std::unique(classes.begin(), classes.end()), classes.end());
    out.group_classes.insert(out.group_classes.end(), classes.begin(), classes.end());
    out.group_starts.push_back(static_cast<int32_t>(out.group_classes.size()));
  }
  return numbers;
}

}  // namespace dlm::compile
