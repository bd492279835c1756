// Only states that tokens lead to are walked from. Three things keep the walks short:
//
// - A state that takes many bytes to few states, as inside a string, is walked over a tree of
// tokens
//   whose bytes are told apart only as far as such states around it do. "hello" and "world" are one
//   there. Where a token leaves these states, the walk goes on over the tree by bytes; what follows
//   there is the same for all states that come to the same place, and is kept.
// - The tokens from one state to another are a list of nodes of these trees. Equal lists are one
//   group, however many states share it: the tokens of n characters, in a counted string.
// - Classes are told apart by groups, each once, and not by states.
#include "compile/token_automaton.h"

#include <algorithm>
#include <deque>
#include <map>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/error.h"

namespace dlm::compile {
namespace {

// A state inside a string takes nearly all bytes, most of them to one state. States of words and
// numbers take few.
constexpr int kManyBytes = 24, kBytesAlike = 16;
constexpr int32_t kEncodedBytes = 96;    // of a text that has to follow, the tokenizer gets so many
constexpr int32_t kCheckedNodes = 4096;  // of a walk between two looks at the clock
constexpr int32_t kNone = -1;

size_t index(int32_t number) { return static_cast<size_t>(number); }

uint64_t mixed(uint64_t hash, uint64_t value) {
  hash = (hash ^ value) * 0x9E3779B97F4A7C15u;
  return hash ^ (hash >> 29);
}

// Bytes of one kind lead to the same state from each state.
struct Kinds {
  std::array<uint8_t, 256> of{};    // the kind of each byte
  std::array<uint8_t, 256> byte{};  // the lowest byte of each kind
  size_t count = 0;
};

Kinds kinds_of(const ByteAutomaton& texts) {
  std::array<uint8_t, 257> is_start{};
  is_start[0] = 1;
  for (const ByteEdge& edge : texts.edges) is_start[edge.low] = is_start[edge.high + 1u] = 1;
  Kinds out;
  for (size_t byte = 0; byte < 256; ++byte) {
    if (is_start[byte]) out.byte[out.count++] = static_cast<uint8_t>(byte);
    out.of[byte] = static_cast<uint8_t>(out.count - 1);
  }
  return out;
}

// A node of a tree: of the tree by bytes as it is, of tree t by classes as a number of its own.
struct Step {
  int32_t node, state;  // its tokens lead to this state
};

// The states of one part of an automaton, in which bytes are told apart alike.
struct Part {
  std::shared_ptr<const TokenTree> tree;  // made when it is first walked
  ByteClasses classes;
  int32_t base = 0;  // the number of the tree's first node
};

class Compiler {
 public:
  Compiler(const ByteAutomaton& texts, const Vocabulary& vocabulary, Budget& budget)
      : texts_(texts),
        vocabulary_(vocabulary),
        tree_(vocabulary.tree()),
        budget_(budget),
        kinds_(kinds_of(texts)) {}

  Automaton make() {
    fill_table();
    find_forced();
    find_parts();
    bases_.push_back({0, &tree_});
    next_base_ = tree_.size();
    walk_all();
    return assembled();
  }

 private:
  // ---- Tables over states ----

  int32_t next(int32_t state, size_t kind) const {
    return table_[index(state) * kinds_.count + kind];
  }

  void fill_table() {
    budget_.check_memory(texts_.states() * kinds_.count * sizeof(int32_t));
    table_.assign(texts_.states() * kinds_.count, kNone);
    for (size_t state = 0; state < texts_.states(); ++state) {
      budget_.check();
      int32_t* const row = table_.data() + state * kinds_.count;
      for (uint32_t i = texts_.starts[state]; i < texts_.starts[state + 1]; ++i) {
        const auto& [low, high, to] = texts_.edges[i];
        for (size_t kind = kinds_.of[low]; kind <= kinds_.of[high]; ++kind) row[kind] = to;
      }
    }
  }

  // forced_[state]: how many bytes have to follow the state, as only one text can.
  void find_forced() {
    const size_t states = texts_.states();
    forced_.assign(states, 0);
    const auto is_forced = [&](size_t state) {
      return texts_.starts[state + 1] - texts_.starts[state] == 1 && !texts_.accepting[state] &&
             texts_.edges[texts_.starts[state]].low == texts_.edges[texts_.starts[state]].high;
    };
    std::vector<int32_t> path;
    for (size_t state = 0; state < states; ++state) {
      budget_.check();
      auto at = static_cast<int32_t>(state);
      path.clear();
      while (forced_[index(at)] == 0 && is_forced(index(at))) {
        path.push_back(at);
        at = texts_.edges[texts_.starts[index(at)]].state;
      }
      int32_t length = forced_[index(at)];
      while (!path.empty()) {
        forced_[index(path.back())] = ++length;
        path.pop_back();
      }
    }
  }

  // part_[state]: the part that the state is of, -1 for states that take few bytes.
  void find_parts() {
    const size_t states = texts_.states();
    part_.assign(states, kNone);
    std::vector<uint8_t> is_wide(states, 0);
    std::unordered_map<int32_t, int> alike;  // bytes by the state that they lead to
    for (size_t state = 0; state < states; ++state) {
      budget_.check();
      int bytes = 0, most = 0;
      alike.clear();
      for (uint32_t i = texts_.starts[state]; i < texts_.starts[state + 1]; ++i) {
        const auto& [low, high, to] = texts_.edges[i];
        bytes += high - low + 1;
        most = std::max(most, alike[to] += high - low + 1);
      }
      is_wide[state] = bytes >= kManyBytes && most >= kBytesAlike;
    }
    // Parts are connected: a tree that tells bytes apart as all of an automaton does would not
    // join many tokens.
    std::vector<int32_t> leader(states);
    for (size_t state = 0; state < states; ++state) leader[state] = static_cast<int32_t>(state);
    const auto find = [&](int32_t state) {
      while (leader[index(state)] != state) {
        leader[index(state)] = leader[index(leader[index(state)])];
        state = leader[index(state)];
      }
      return state;
    };
    for (size_t state = 0; state < states; ++state)
      for (uint32_t i = texts_.starts[state]; is_wide[state] && i < texts_.starts[state + 1]; ++i)
        if (is_wide[index(texts_.edges[i].state)])
          leader[index(find(static_cast<int32_t>(state)))] = find(texts_.edges[i].state);
    std::unordered_map<int32_t, std::vector<int32_t>> members;
    for (size_t state = 0; state < states; ++state)
      if (is_wide[state])
        members[find(static_cast<int32_t>(state))].push_back(static_cast<int32_t>(state));
    std::map<ByteClasses, int32_t> known;  // parts that tell bytes apart alike are one
    for (size_t state = 0; state < states; ++state) {
      const auto at = members.find(static_cast<int32_t>(state));
      if (at == members.end() || at->second.size() < 2) continue;
      const ByteClasses classes = classes_of(at->second);
      const auto [part, is_new] = known.try_emplace(classes, static_cast<int32_t>(parts_.size()));
      if (is_new) parts_.push_back({nullptr, classes, 0});
      for (const int32_t member : at->second) part_[index(member)] = part->second;
    }
  }

  // Bytes are of one class if all of these states lead to the same state by them.
  ByteClasses classes_of(const std::vector<int32_t>& states) {
    std::vector<int16_t> number(kinds_.count, 0);
    std::vector<size_t> first{0};  // kind of each number
    for (const int32_t state : states) {
      budget_.check();
      bool holds = true;
      for (size_t kind = 0; kind < kinds_.count && holds; ++kind)
        holds = next(state, kind) == next(state, first[static_cast<size_t>(number[kind])]);
      if (holds) continue;
      std::map<std::pair<int16_t, int32_t>, int16_t> numbers;
      first.clear();
      for (size_t kind = 0; kind < kinds_.count; ++kind) {
        const auto [at, is_new] = numbers.try_emplace({number[kind], next(state, kind)},
                                                      static_cast<int16_t>(numbers.size()));
        if (is_new) first.push_back(kind);
        number[kind] = at->second;
      }
    }
    ByteClasses out;
    for (size_t byte = 0; byte < 256; ++byte) out[byte] = number[kinds_.of[byte]];
    // A byte that none of them takes is left out.
    for (size_t kind = 0; kind < kinds_.count; ++kind) {
      if (std::any_of(states.begin(), states.end(),
                      [&](int32_t state) { return next(state, kind) >= 0; }))
        continue;
      for (size_t byte = 0; byte < 256; ++byte)
        if (kinds_.of[byte] == kind) out[byte] = kNone;
    }
    return out;
  }

  // ---- Walks ----

  void walk_all() {
    const size_t states = texts_.states();
    is_met_.assign(states, 0);
    row_of_.assign(states, kNone);
    std::deque<int32_t> open{0};
    is_met_[0] = 1;
    std::vector<int32_t> slot(states, kNone), targets;
    std::vector<std::vector<int32_t>> lists;
    while (!open.empty()) {
      const int32_t state = open.front();
      open.pop_front();
      budget_.check_time();
      walk(state);
      // The steps by the state that they lead to.
      targets.clear();
      for (const auto& [node, to] : steps_) {
        int32_t& at = slot[index(to)];
        if (at < 0) {
          at = static_cast<int32_t>(targets.size());
          targets.push_back(to);
          if (lists.size() < targets.size()) lists.emplace_back();
          lists[index(at)].clear();
        }
        lists[index(at)].push_back(node);
      }
      row_of_[index(state)] = static_cast<int32_t>(rows_.size());
      rows_.emplace_back();
      for (size_t i = 0; i < targets.size(); ++i) {
        const int32_t to = targets[i];
        slot[index(to)] = kNone;
        rows_.back().push_back({group_of(lists[i]), to});
        if (!is_met_[index(to)]) {
          is_met_[index(to)] = 1;
          open.push_back(to);
        }
      }
      edges_ += targets.size();
      budget_.check_memory(table_.size() * sizeof(int32_t) + edges_ * sizeof(Step) +
                           (content_.size() + 2 * behind_.size()) * sizeof(int32_t) +
                           continued_.size() * 64);
    }
  }

  // Fills steps_ with all tokens that lead on from a state.
  void walk(int32_t state) {
    steps_.clear();
    if (part_[index(state)] >= 0) {
      walk_part(state);
      return;
    }
    walk_bytes(0, tree_.size(), 0, state, steps_);
    if (const int32_t forced = forced_[index(state)]; forced > 0) {
      const int32_t wanted = vocabulary_.first_node(text_after(state));
      if (wanted >= 0)
        steps_.erase(std::remove_if(steps_.begin(), steps_.end(),
                                    [&](const Step& step) {
                                      return step.node != wanted &&
                                             tree_.depths[index(step.node)] <= forced;
                                    }),
                     steps_.end());
    }
  }

  // The text that has to follow a state, as far as the tokenizer gets it: whole characters.
  std::string text_after(int32_t state) const {
    std::string out;
    while (forced_[index(state)] > 0 && out.size() < kEncodedBytes) {
      const ByteEdge& edge = texts_.edges[texts_.starts[index(state)]];
      out += static_cast<char>(edge.low);
      state = edge.state;
    }
    const auto byte_at = [&](size_t i) { return static_cast<uint8_t>(out[i]); };
    if ((byte_at(0) & 0xC0) == 0x80) return "";
    size_t last = out.size() - 1;  // where the last character starts
    while (last > 0 && (byte_at(last) & 0xC0) == 0x80) --last;
    const uint8_t lead = byte_at(last);
    const size_t needed = lead < 0x80 ? 1 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
    if (out.size() - last < needed) out.resize(last);
    return out;
  }

  // Steps of the nodes [first, end) of the tree by bytes, whose parent has `depth` bytes and leads
  // to `state`.
  void walk_bytes(int32_t first, int32_t end, int32_t depth, int32_t state,
                  std::vector<Step>& out) {
    if (states_.size() < 64) states_.resize(64);
    states_[0] = state;
    const uint8_t* const bytes = tree_.bytes.data();
    const int32_t *const depths = tree_.depths.data(), *const behind = tree_.behind.data(),
                         *const starts = tree_.token_starts.data();
    int32_t left = kCheckedNodes;
    for (int32_t node = first; node < end;) {
      if (--left == 0) {
        left = kCheckedNodes;
        budget_.check();
      }
      const size_t above = index(depths[node] - depth - 1);
      const int32_t to = next(states_[above], kinds_.of[bytes[node]]);
      if (to < 0) {
        node = behind[node];
        continue;
      }
      if (starts[node] < starts[node + 1]) out.push_back({node, to});
      if (above + 1 >= states_.size()) states_.resize(2 * states_.size());
      states_[above + 1] = to;
      ++node;
    }
  }

  // walk() for a state of a part.
  void walk_part(int32_t start) {
    const int32_t number = part_[index(start)];
    Part& part = parts_[index(number)];
    if (part.tree == nullptr) {
      part.tree = vocabulary_.by_classes(part.classes, budget_);
      part.base = next_base_;
      bases_.push_back({part.base, part.tree.get()});
      next_base_ += part.tree->size();
    }
    const TokenTree& tree = *part.tree;
    std::vector<int32_t> states{start};
    int32_t left = kCheckedNodes;
    for (int32_t node = 0; node < tree.size();) {
      if (--left == 0) {
        left = kCheckedNodes;
        budget_.check();
      }
      const size_t above = index(tree.depths[index(node)] - 1);
      const int32_t to = next(states[above], kinds_.of[tree.bytes[index(node)]]);
      if (to < 0) {
        node = tree.behind[index(node)];
        continue;
      }
      if (tree.has_tokens(node)) steps_.push_back({part.base + node, to});
      if (part_[index(to)] != number) {
        go_on(part, node, to);
        node = tree.behind[index(node)];
        continue;
      }
      if (above + 1 >= states.size()) states.resize(2 * states.size() + 1);
      states[above + 1] = to;
      ++node;
    }
  }

  // Appends the steps that go on from a node by classes, which leads to a state out of its part.
  void go_on(const Part& part, int32_t node, int32_t state) {
    const uint64_t key =
        static_cast<uint64_t>(part.base + node) << 32 | static_cast<uint32_t>(state);
    const auto [at, is_new] = continued_.try_emplace(key, std::pair{size_t{0}, size_t{0}});
    if (is_new) {
      const TokenTree& tree = *part.tree;
      const size_t first = behind_.size();
      for (int32_t i = tree.node_starts[index(node)]; i < tree.node_starts[index(node) + 1]; ++i) {
        const int32_t from = tree.nodes[index(i)];
        walk_bytes(from + 1, tree_.behind[index(from)], tree_.depths[index(from)], state, behind_);
      }
      at->second = {first, behind_.size()};
    }
    const auto [first, last] = at->second;
    steps_.insert(steps_.end(), behind_.begin() + static_cast<ptrdiff_t>(first),
                  behind_.begin() + static_cast<ptrdiff_t>(last));
  }

  // The number of a list of nodes.
  int32_t group_of(const std::vector<int32_t>& nodes) {
    uint64_t hash = nodes.size();
    for (const int32_t node : nodes) hash = mixed(hash, static_cast<uint64_t>(node));
    for (auto [at, last] = numbers_.equal_range(hash); at != last; ++at) {
      const auto first = content_.begin() + static_cast<ptrdiff_t>(begins_[index(at->second)]);
      const auto end = content_.begin() + static_cast<ptrdiff_t>(begins_[index(at->second) + 1]);
      if (std::equal(nodes.begin(), nodes.end(), first, end)) return at->second;
    }
    const auto number = static_cast<int32_t>(begins_.size()) - 1;
    numbers_.emplace(hash, number);
    content_.insert(content_.end(), nodes.begin(), nodes.end());
    begins_.push_back(content_.size());
    return number;
  }

  template <class See>
  void each_token(int32_t group, See see) const {
    for (size_t i = begins_[index(group)]; i < begins_[index(group) + 1]; ++i) {
      const int32_t node = content_[i];
      const auto after =
          std::upper_bound(bases_.begin(), bases_.end(), node,
                           [](int32_t value, const std::pair<int32_t, const TokenTree*>& each) {
                             return value < each.first;
                           });
      const auto& [base, tree] = *std::prev(after);
      for (int32_t j = tree->token_starts[index(node - base)];
           j < tree->token_starts[index(node - base) + 1]; ++j)
        see(tree->tokens[index(j)]);
    }
  }

  // ---- What comes of it ----

  // The fewest tokens from each state to where a text may end, -1 if there is no way. After it,
  // only states and edges on a text's path are left in is_met_ and rows_.
  std::vector<int32_t> measure() {
    const size_t states = texts_.states();
    std::vector<uint32_t> begins(states + 2);
    const auto each_edge = [&](auto visit) {
      for (size_t state = 0; state < states; ++state)
        if (is_met_[state])
          for (const auto& [group, to] : rows_[index(row_of_[state])])
            visit(static_cast<int32_t>(state), index(to));
    };
    each_edge([&](int32_t, size_t to) { ++begins[to + 2]; });
    for (size_t i = 2; i < begins.size(); ++i) begins[i] += begins[i - 1];
    std::vector<int32_t> sources(begins.back());
    each_edge([&](int32_t from, size_t to) { sources[begins[to + 1]++] = from; });
    std::vector<int32_t> distances(states, kNone), order;
    for (size_t state = 0; state < states; ++state)
      if (is_met_[state] && texts_.accepting[state]) {
        distances[state] = 0;
        order.push_back(static_cast<int32_t>(state));
      }
    for (size_t i = 0; i < order.size(); ++i) {
      budget_.check();
      for (uint32_t j = begins[index(order[i])]; j < begins[index(order[i]) + 1]; ++j)
        if (distances[index(sources[j])] < 0) {
          distances[index(sources[j])] = distances[index(order[i])] + 1;
          order.push_back(sources[j]);
        }
    }
    if (distances[0] < 0)
      fail(DLM_INVALID_ARGUMENT,
           "constraint: no tokens of this vocabulary make a text that it allows");
    for (auto& row : rows_)
      row.erase(std::remove_if(row.begin(), row.end(),
                               [&](const Edge& edge) { return distances[index(edge.state)] < 0; }),
                row.end());
    for (size_t state = 0; state < states; ++state)
      if (is_met_[state] && distances[state] < 0) is_met_[state] = 0;
    return distances;
  }

  Automaton assembled() {
    const std::vector<int32_t> distances = measure();
    Automaton out{};
    out.vocab_size = vocabulary_.vocab_size();
    // Groups that are left, and classes of tokens that are in the same of them.
    std::vector<int32_t> used(begins_.size() - 1, kNone), groups;
    std::vector<int32_t> renamed(texts_.states(), kNone);
    for (size_t state = 0; state < texts_.states(); ++state) {
      if (!is_met_[state]) continue;
      renamed[state] = out.states++;
      for (const auto& [group, to] : rows_[index(row_of_[state])])
        if (used[index(group)] < 0) {
          used[index(group)] = 0;
          groups.push_back(group);
        }
    }
    const int32_t end_state = out.states++;
    name_classes(out, groups);
    const int32_t end_class = out.classes++;
    for (const int32_t end : vocabulary_.ends()) out.token_class[index(end)] = end_class;
    list_groups(out, groups, used, end_class);
    const int32_t end_group = out.groups - 1;
    out.edge_starts.push_back(0);
    for (size_t state = 0; state < texts_.states(); ++state) {
      if (!is_met_[state]) continue;
      budget_.check();
      auto& row = rows_[index(row_of_[state])];
      std::sort(row.begin(), row.end(),
                [](const Edge& a, const Edge& b) { return a.state < b.state; });
      for (const auto& [group, to] : row) {
        out.edge_states.push_back(renamed[index(to)]);
        out.edge_groups.push_back(used[index(group)]);
      }
      if (texts_.accepting[state]) {
        out.edge_states.push_back(end_state);
        out.edge_groups.push_back(end_group);
      }
      out.edge_starts.push_back(static_cast<int32_t>(out.edge_states.size()));
      out.distances.push_back(distances[state]);
    }
    out.edge_states.push_back(end_state);
    out.edge_groups.push_back(end_group);
    out.edge_starts.push_back(static_cast<int32_t>(out.edge_states.size()));
    out.distances.push_back(0);
    budget_.check_edges(out.edge_states.size());
    list_tokens(out);
    return out;
  }

  // Fills token_class: tokens are of one class if they are in the same groups. Classes are numbered
  // by their lowest tokens.
  void name_classes(Automaton& out, const std::vector<int32_t>& groups) {
    std::vector<int32_t> class_of(index(out.vocab_size), 0);
    std::vector<int32_t> sizes{out.vocab_size};
    struct Mark {
      int32_t round, count, fresh;  // the class for the tokens that are in the group
    };
    std::vector<Mark> marks{{kNone, 0, kNone}};
    int32_t round = 0;
    for (const int32_t group : groups) {
      budget_.check_time();
      each_token(group, [&](int32_t token) {
        Mark& mark = marks[index(class_of[index(token)])];
        if (mark.round != round) mark = {round, 0, kNone};
        ++mark.count;
      });
      each_token(group, [&](int32_t token) {
        const int32_t from = class_of[index(token)];
        Mark& mark = marks[index(from)];
        if (mark.round != round || mark.fresh == from) return;
        if (mark.fresh < 0) {
          // The class of tokens that are in no group keeps its number, whoever leaves it.
          if (mark.count == sizes[index(from)] && from != 0) {
            mark.fresh = from;
            return;
          }
          mark.fresh = static_cast<int32_t>(sizes.size());
          sizes[index(from)] -= mark.count;
          sizes.push_back(mark.count);
          marks.push_back({kNone, 0, kNone});
        }
        class_of[index(token)] = marks[index(from)].fresh;
      });
      ++round;
    }
    out.token_class.assign(index(out.vocab_size), kNone);
    std::vector<int32_t> names(sizes.size(), kNone);
    for (size_t token = 0; token < class_of.size(); ++token) {
      if (class_of[token] == 0) continue;
      int32_t& name = names[index(class_of[token])];
      if (name < 0) name = out.classes++;
      out.token_class[token] = name;
    }
  }

  // Fills the groups by their classes, equal ones once. used: the group of each list of nodes.
  void list_groups(Automaton& out, const std::vector<int32_t>& groups, std::vector<int32_t>& used,
                   int32_t end_class) {
    std::map<std::vector<int32_t>, int32_t> known;
    std::vector<int32_t> seen(index(out.classes), kNone), classes;
    out.group_starts.push_back(0);
    for (const int32_t group : groups) {
      budget_.check_time();
      classes.clear();
      each_token(group, [&](int32_t token) {
        const int32_t number = out.token_class[index(token)];
        if (std::exchange(seen[index(number)], group) != group) classes.push_back(number);
      });
      std::sort(classes.begin(), classes.end());
      const auto [at, is_new] = known.try_emplace(classes, out.groups);
      used[index(group)] = at->second;
      if (!is_new) continue;
      ++out.groups;
      out.group_classes.insert(out.group_classes.end(), classes.begin(), classes.end());
      out.group_starts.push_back(static_cast<int32_t>(out.group_classes.size()));
      budget_.check_memory(out.group_classes.size() * 2 * sizeof(int32_t));
    }
    ++out.groups;
    out.group_classes.push_back(end_class);
    out.group_starts.push_back(static_cast<int32_t>(out.group_classes.size()));
  }

  struct Edge {
    int32_t group, state;
  };

  const ByteAutomaton& texts_;
  const Vocabulary& vocabulary_;
  const TokenTree& tree_;
  Budget& budget_;
  const Kinds kinds_;
  std::vector<int32_t> table_;  // [states, kinds]: the next state, -1: none
  std::vector<int32_t> forced_, part_;
  std::vector<Part> parts_;
  std::vector<std::pair<int32_t, const TokenTree*>>
      bases_;  // the first number of each tree's nodes
  int32_t next_base_ = 0;

  std::vector<uint8_t> is_met_;  // [states]: whether tokens lead there
  std::vector<int32_t> row_of_;  // [states]: its row of rows_
  std::vector<std::vector<Edge>> rows_;
  size_t edges_ = 0;
  std::vector<Step> steps_, behind_;
  std::vector<int32_t> states_;                                        // of a walk, by depth
  std::unordered_map<uint64_t, std::pair<size_t, size_t>> continued_;  // steps in behind_

  std::vector<int32_t> content_;   // the nodes of all groups
  std::vector<size_t> begins_{0};  // of group g the content [begins_[g], begins_[g + 1])
  std::unordered_multimap<uint64_t, int32_t> numbers_;
};

}  // namespace

Automaton token_automaton(const ByteAutomaton& texts, const Vocabulary& vocabulary,
                          Budget& budget) {
  return Compiler(texts, vocabulary, budget).make();
}

}  // namespace dlm::compile
