// Minimises an automaton. The code visits the strongly connected components of the automaton one
// after another. It starts at the states where texts end, and finishes at the start state. It
// replaces the states of each component by new states. The new states are the states of the minimal
// automaton.
//
// Two states are equal if they accept the same continuations. If a state is outside of cycles, a
// single look-up finds the equal new state, as in Revuz (1992). If a component contains cycles,
// partition refinement separates its states that are not equal (Hopcroft 1971). After this
// refinement, either all states of the component are equal to existing new states, or no state is.
// In real constraints, most states are outside of cycles, so the code visits most states only once.
#include <algorithm>
#include <utility>

#include "compile/automata/byte_automaton.h"
#include "compile/automata/hash_index.h"
#include "compile/automata/numbers.h"

namespace dlm::compile {
namespace {

bool equal(const ByteEdge* a, const ByteEdge* b, size_t count) {
  for (size_t i = 0; i < count; ++i)
    if (a[i].low != b[i].low || a[i].high != b[i].high || a[i].state != b[i].state) return false;
  return true;
}

class Minimiser {
 public:
  Minimiser(const ByteAutomaton& raw, int32_t first, Budget& budget)
      : raw_(raw), first_(first), budget_(budget) {}

  ByteAutomaton make() {
    if (raw_.is_empty()) return {};
    budget_.check_memory(raw_.states() * 64 + raw_.edges.size() * 2 * sizeof(ByteEdge));
    measure_distances();
    if (distances_[index(first_)] < 0) return {};
    made_.starts.push_back(0);
    canonical_.assign(raw_.states(), kNone);
    component_.assign(raw_.states(), kNone);
    visit_components();
    return in_order();
  }

 private:
  // For each state, computes the smallest number of bytes from the state to the end of a text. This
  // number is -1 if no end can be reached.
  void measure_distances() {
    std::vector<uint32_t> begins(raw_.states() + 2);
    for (const ByteEdge& edge : raw_.edges) ++begins[index(edge.state) + 2];
    for (size_t i = 2; i < begins.size(); ++i) begins[i] += begins[i - 1];
    std::vector<int32_t> sources(raw_.edges.size());
    for (size_t state = 0; state < raw_.states(); ++state)
      for (uint32_t i = raw_.starts[state]; i < raw_.starts[state + 1]; ++i)
        sources[begins[index(raw_.edges[i].state) + 1]++] = static_cast<int32_t>(state);
    distances_.assign(raw_.states(), kNone);
    std::vector<int32_t> order;
    for (size_t state = 0; state < raw_.states(); ++state)
      if (raw_.accepting[state]) {
        distances_[state] = 0;
        order.push_back(static_cast<int32_t>(state));
      }
    for (size_t i = 0; i < order.size(); ++i) {
      budget_.check();
      const int32_t state = order[i];
      for (uint32_t j = begins[index(state)]; j < begins[index(state) + 1]; ++j)
        if (distances_[index(sources[j])] < 0) {
          distances_[index(sources[j])] = distances_[index(state)] + 1;
          order.push_back(sources[j]);
        }
    }
  }

  // Finds the strongly connected components with Tarjan's algorithm (1972) and an explicit stack.
  // The algorithm completes a component only after all components to which its edges lead.
  void visit_components() {
    struct Frame {
      int32_t state;
      uint32_t edge;
    };
    std::vector<int32_t> numbers(raw_.states(), kNone), lowest(raw_.states(), 0), open;
    std::vector<Frame> frames;
    int32_t next_number = 0;
    const auto enter = [&](int32_t state) {
      numbers[index(state)] = lowest[index(state)] = next_number++;
      open.push_back(state);
      frames.push_back({state, raw_.starts[index(state)]});
    };
    enter(first_);
    while (!frames.empty()) {
      budget_.check();
      const int32_t state = frames.back().state;
      if (frames.back().edge < raw_.starts[index(state) + 1]) {
        const int32_t to = raw_.edges[frames.back().edge++].state;
        if (distances_[index(to)] < 0) continue;
        if (numbers[index(to)] < 0)
          enter(to);
        else if (component_[index(to)] < 0)
          lowest[index(state)] = std::min(lowest[index(state)], numbers[index(to)]);
        continue;
      }
      frames.pop_back();
      if (!frames.empty()) {
        int32_t& above = lowest[index(frames.back().state)];
        above = std::min(above, lowest[index(state)]);
      }
      if (lowest[index(state)] != numbers[index(state)]) continue;
      members_.clear();
      do {
        members_.push_back(open.back());
        component_[index(open.back())] = components_;
        open.pop_back();
      } while (members_.back() != state);
      finish_component();
      ++components_;
    }
  }

  void finish_component() {
    const int32_t state = members_.front();
    const auto begin = raw_.edges.begin() + raw_.starts[index(state)];
    const auto end = raw_.edges.begin() + raw_.starts[index(state) + 1];
    if (members_.size() == 1 &&
        std::none_of(begin, end, [&](const ByteEdge& edge) { return edge.state == state; })) {
      edges_of(state, [&](int32_t to) { return canonical_[index(to)]; });
      canonical_[index(state)] = find_or_add(raw_.accepting[index(state)]);
      return;
    }
    refine();
    if (!merge_component()) add_component();
  }

  // Sets edges_ to the edges of a state, without the edges to states that cannot reach an end.
  // Replaces each next state `to` by name(to).
  template <class Name>
  void edges_of(int32_t state, Name name) {
    edges_.clear();
    for (uint32_t i = raw_.starts[index(state)]; i < raw_.starts[index(state) + 1]; ++i) {
      const auto [low, high, to] = raw_.edges[i];
      if (distances_[index(to)] < 0) continue;
      const int32_t named = name(to);
      if (!edges_.empty() && edges_.back().state == named && edges_.back().high + 1 == low)
        edges_.back().high = high;
      else
        edges_.push_back({low, high, named});
    }
  }

  uint64_t hash_edges(uint64_t hash) const {
    for (const auto& [low, high, state] : edges_)
      hash = mixed(hash, static_cast<uint64_t>(low) << 40 | static_cast<uint64_t>(high) << 32 |
                             static_cast<uint32_t>(state));
    return hash;
  }

  bool has_edges(int32_t made, bool accepting) const {
    const uint32_t from = made_.starts[index(made)], to = made_.starts[index(made) + 1];
    return (made_.accepting[index(made)] != 0) == accepting && to - from == edges_.size() &&
           equal(made_.edges.data() + from, edges_.data(), edges_.size());
  }

  // Returns the new state whose edges are edges_. If there is no such state, adds it.
  int32_t find_or_add(bool accepting) {
    const uint64_t hash = hash_edges(accepting);
    const int32_t known =
        by_edges_.find(hash, [&](int32_t made) { return has_edges(made, accepting); });
    return known >= 0 ? known : add(accepting, hash);
  }

  int32_t add(bool accepting, uint64_t hash) {
    const auto made = static_cast<int32_t>(made_.states());
    budget_.check_states(made_.states());
    budget_.check();
    made_.edges.insert(made_.edges.end(), edges_.begin(), edges_.end());
    made_.starts.push_back(static_cast<uint32_t>(made_.edges.size()));
    made_.accepting.push_back(accepting);
    by_edges_.add(hash, made);
    return made;
  }

  // Sets class_ to the class of each member of the component. Equal states get the same class.
  // Classes are numbered from 0. In edges_, an edge inside the component contains the class of the
  // next state. An edge that leaves the component contains ~state, where `state` is the new state
  // to which it leads.
  //
  // When a class is split, its largest part keeps the number of the class. After the split, the
  // code visits again only the states with edges to the other parts. So it visits each state O(log
  // n) times, where n is the number of states.
  void refine() {
    const size_t count = members_.size();
    if (local_.empty()) local_.assign(raw_.states(), 0);
    for (size_t i = 0; i < count; ++i) local_[index(members_[i])] = static_cast<int32_t>(i);
    seed_classes();
    parts_.clear();
    for (size_t i = 0; i < count; ++i) {
      if (index(class_[i]) >= parts_.size()) parts_.resize(index(class_[i]) + 1);
      parts_[index(class_[i])].push_back(static_cast<int32_t>(i));
    }
    place_.assign(count, 0);
    for (auto& part : parts_)
      for (size_t i = 0; i < part.size(); ++i) place_[index(part[i])] = i;
    list_sources();
    std::vector<int32_t> changed(count);
    for (size_t i = 0; i < count; ++i) changed[i] = static_cast<int32_t>(i);
    std::vector<uint8_t> is_listed(count, 0);
    while (!changed.empty()) {
      std::vector<int32_t> next;
      split(changed, [&](int32_t relabelled) {
        for (uint32_t j = begins_[index(relabelled)]; j < begins_[index(relabelled) + 1]; ++j)
          if (!is_listed[index(sources_[j])]) {
            is_listed[index(sources_[j])] = 1;
            next.push_back(sources_[j]);
          }
      });
      for (const int32_t each : next) is_listed[index(each)] = 0;
      changed.swap(next);
      budget_.check_states(made_.states() + parts_.size() - 1);
    }
  }

  // Divides the states into initial classes, and stores these classes in class_. Equal states get
  // the same class, and most unequal states get different classes.
  //
  // The states of a class have the same distance to an end, and the same hash. The function
  // computes the hashes of all states in several rounds. The hash of a state depends on the hashes
  // of its next states. If a next state is nearer to an end, the function uses its hash from the
  // current round. Otherwise it uses the next state's hash from the previous round. When a round
  // separates only few states, the function stops, and split() does the remaining work.
  void seed_classes() {
    constexpr int kMostRounds = 16;
    const size_t count = members_.size();
    std::vector<int32_t> before(count), hashes(count);
    const auto distance_of = [&](int32_t member) {
      return distances_[index(members_[index(member)])];
    };
    for (size_t i = 0; i < count; ++i) before[i] = distance_of(static_cast<int32_t>(i));
    const std::vector<int32_t> order = by_distance();
    size_t found = 0;
    for (int round = 0; round < kMostRounds; ++round) {
      HashIndex by_key;
      std::vector<uint64_t> keys;  // for each class: its distance and hash
      class_.assign(count, kNone);
      for (const int32_t member : order) {
        budget_.check();
        const int32_t distance = distance_of(member);
        edges_of(members_[index(member)], [&](int32_t to) {
          if (component_[index(to)] != components_) return ~canonical_[index(to)];
          const size_t at = index(local_[index(to)]);
          return distances_[index(to)] < distance ? hashes[at] : before[at];
        });
        hashes[index(member)] = static_cast<int32_t>(hash_edges(static_cast<uint64_t>(distance)));
        const uint64_t key =
            static_cast<uint64_t>(distance) << 32 | static_cast<uint32_t>(hashes[index(member)]);
        const uint64_t hash = mixed(0, key);
        int32_t number = by_key.find(hash, [&](int32_t each) { return keys[index(each)] == key; });
        if (number < 0) {
          number = static_cast<int32_t>(keys.size());
          by_key.add(hash, number);
          keys.push_back(key);
        }
        class_[index(member)] = number;
      }
      before.swap(hashes);
      if (keys.size() == count || keys.size() - found <= found / 16) break;
      found = keys.size();
    }
  }

  // Returns the members, sorted by their distance to an end. All distances between the smallest and
  // the largest occur, because one byte reduces the distance by at most 1.
  std::vector<int32_t> by_distance() const {
    int32_t least = distances_[index(members_.front())], most = least;
    for (const int32_t state : members_) {
      least = std::min(least, distances_[index(state)]);
      most = std::max(most, distances_[index(state)]);
    }
    std::vector<size_t> begins(index(most - least) + 2, 0);
    for (const int32_t state : members_) ++begins[index(distances_[index(state)] - least) + 1];
    for (size_t i = 1; i < begins.size(); ++i) begins[i] += begins[i - 1];
    std::vector<int32_t> out(members_.size());
    for (size_t i = 0; i < members_.size(); ++i)
      out[begins[index(distances_[index(members_[i])] - least)]++] = static_cast<int32_t>(i);
    return out;
  }

  int32_t name(int32_t to) const {
    return component_[index(to)] == components_ ? class_[index(local_[index(to)])]
                                                : ~canonical_[index(to)];
  }

  // Lists the sources of each member. A source is a member that has an edge to this member.
  void list_sources() {
    const size_t count = members_.size();
    begins_.assign(count + 2, 0);
    const auto each_edge = [&](auto visit) {
      for (size_t i = 0; i < count; ++i) {
        const size_t state = index(members_[i]);
        for (uint32_t j = raw_.starts[state]; j < raw_.starts[state + 1]; ++j)
          if (component_[index(raw_.edges[j].state)] == components_)
            visit(static_cast<int32_t>(i), index(local_[index(raw_.edges[j].state)]));
      }
    };
    each_edge([&](int32_t, size_t to) { ++begins_[to + 2]; });
    for (size_t i = 2; i < begins_.size(); ++i) begins_[i] += begins_[i - 1];
    sources_.assign(begins_.back(), 0);
    each_edge([&](int32_t from, size_t to) { sources_[begins_[to + 1]++] = from; });
  }

  // Splits the classes that contain the members in `changed`. Members of a class stay together if
  // their edges lead to the same classes. Calls relabelled(member) for each member whose class
  // number changes.
  template <class Relabelled>
  void split(const std::vector<int32_t>& changed, Relabelled relabelled) {
    struct Signature {
      uint64_t hash;
      int32_t number;        // the class of the member
      uint32_t start, size;  // the index of the first edge in `content`, and the number of edges
      int32_t member;
    };
    std::vector<ByteEdge> content;
    std::vector<Signature> signatures;
    for (const int32_t member : changed) {
      budget_.check();
      if (parts_[index(class_[index(member)])].size() == 1) continue;
      edges_of(members_[index(member)], [&](int32_t to) { return name(to); });
      signatures.push_back({hash_edges(0), class_[index(member)],
                            static_cast<uint32_t>(content.size()),
                            static_cast<uint32_t>(edges_.size()), member});
      content.insert(content.end(), edges_.begin(), edges_.end());
    }
    // Compares two signatures for sorting. Returns 0 if they are equal.
    const auto compare = [&](const Signature& a, const Signature& b) {
      if (a.number != b.number) return a.number < b.number ? -1 : 1;
      if (a.hash != b.hash) return a.hash < b.hash ? -1 : 1;
      if (a.size != b.size) return a.size < b.size ? -1 : 1;
      for (uint32_t i = 0; i < a.size; ++i) {
        const ByteEdge &x = content[a.start + i], &y = content[b.start + i];
        if (x.low != y.low) return x.low < y.low ? -1 : 1;
        if (x.high != y.high) return x.high < y.high ? -1 : 1;
        if (x.state != y.state) return x.state < y.state ? -1 : 1;
      }
      return 0;
    };
    std::sort(signatures.begin(), signatures.end(),
              [&](const Signature& a, const Signature& b) { return compare(a, b) < 0; });
    std::vector<int32_t> moved;
    for (size_t first = 0; first < signatures.size();) {
      const int32_t number = signatures[first].number;
      size_t last = first;
      std::vector<std::pair<size_t, size_t>> runs;  // the ranges of equal signatures
      while (last < signatures.size() && signatures[last].number == number) {
        size_t end = last + 1;
        while (end < signatures.size() && compare(signatures[last], signatures[end]) == 0) ++end;
        runs.emplace_back(last, end);
        last = end;
      }
      const size_t unchanged = parts_[index(number)].size() - (last - first);
      size_t largest = 0;
      for (size_t i = 1; i < runs.size(); ++i)
        if (runs[i].second - runs[i].first > runs[largest].second - runs[largest].first)
          largest = i;
      // The members of the class that are not in `changed` form a separate part, because their
      // edges lead only to classes that kept their numbers. Each member in `changed` has an edge to
      // a class with a new number.
      const bool keeps_unchanged = unchanged >= runs[largest].second - runs[largest].first;
      std::vector<std::vector<int32_t>> others;
      for (size_t i = 0; i < runs.size(); ++i) {
        if (i == largest && !keeps_unchanged) continue;
        others.emplace_back();
        for (size_t j = runs[i].first; j < runs[i].second; ++j)
          others.back().push_back(signatures[j].member);
      }
      if (!keeps_unchanged && unchanged > 0) {
        for (size_t j = first; j < last; ++j) remove(signatures[j].member);
        others.push_back(std::move(parts_[index(number)]));
        parts_[index(number)].clear();
        for (size_t j = runs[largest].first; j < runs[largest].second; ++j)
          insert(number, signatures[j].member);
        for (const auto& part : others)
          for (const int32_t member : part) moved.push_back(member);
      } else {
        for (const auto& part : others)
          for (const int32_t member : part) {
            remove(member);
            moved.push_back(member);
          }
      }
      for (auto& part : others) {
        const auto fresh = static_cast<int32_t>(parts_.size());
        parts_.emplace_back();
        for (const int32_t member : part) insert(fresh, member);
      }
      first = last;
    }
    for (const int32_t member : moved) relabelled(member);
  }

  void remove(int32_t member) {
    std::vector<int32_t>& part = parts_[index(class_[index(member)])];
    const int32_t last = part.back();
    part[place_[index(member)]] = last;
    place_[index(last)] = place_[index(member)];
    part.pop_back();
  }
  void insert(int32_t number, int32_t member) {
    class_[index(member)] = number;
    place_[index(member)] = parts_[index(number)].size();
    parts_[index(number)].push_back(member);
  }

  // Returns a hash of the state whose edges are edges_. Equal states have the same hash, and most
  // unequal states have different hashes.
  uint64_t hash_shape(bool accepting, int32_t distance) const {
    uint64_t hash = mixed(accepting, static_cast<uint64_t>(distance));
    int first = -2, last = -2;
    for (const auto& [low, high, state] : edges_) {
      if (low != last + 1) {
        hash = mixed(hash, static_cast<uint64_t>(first) << 16 | static_cast<uint16_t>(last));
        first = low;
      }
      last = high;
    }
    return mixed(hash, static_cast<uint64_t>(first) << 16 | static_cast<uint16_t>(last));
  }

  // Returns true if the component's states are equal to new states that already exist. In this
  // case, fills canonical_. The search starts from only one member, because each member can reach
  // all other members.
  bool merge_component() {
    const int32_t pivot = parts_.front().front();
    const int32_t state = members_[index(pivot)];
    edges_of(state, [&](int32_t to) { return name(to); });
    const uint64_t hash = hash_shape(raw_.accepting[index(state)], distances_[index(state)]);
    const int32_t first = by_shape_.find(hash, [](int32_t) { return true; });
    for (int32_t made = first; made >= 0; made = next_shape_[index(made)]) {
      std::vector<int32_t> images(parts_.size(), kNone), open{class_[index(pivot)]};
      images[index(open.front())] = made;
      bool is_equal = true;
      while (is_equal && !open.empty()) {
        budget_.check();
        const int32_t number = open.back();
        open.pop_back();
        is_equal = matches_image(number, images, open);
      }
      if (!is_equal) continue;
      for (size_t i = 0; i < members_.size(); ++i)
        canonical_[index(members_[i])] = images[index(class_[i])];
      return true;
    }
    return false;
  }

  // The image of a class is an existing new state that may be equal to the states of the class.
  // This function compares a class with its image, edge by edge. Edges of the class lead to other
  // classes. The function also assigns images to these classes.
  bool matches_image(int32_t number, std::vector<int32_t>& images, std::vector<int32_t>& open) {
    const int32_t state = members_[index(parts_[index(number)].front())];
    const int32_t image = images[index(number)];
    if ((raw_.accepting[index(state)] != 0) != (made_.accepting[index(image)] != 0)) return false;
    edges_of(state, [&](int32_t to) { return name(to); });
    const ByteEdge* other = made_.edges.data() + made_.starts[index(image)];
    const ByteEdge* const last = made_.edges.data() + made_.starts[index(image) + 1];
    int covered = 0, wanted = 0;
    for (const ByteEdge* each = other; each != last; ++each) wanted += each->high - each->low + 1;
    for (const auto& [low, high, to] : edges_) {
      for (int byte = low; byte <= high;) {
        while (other != last && other->high < byte) ++other;
        if (other == last || other->low > byte) return false;
        const int end = std::min<int>(high, other->high);
        covered += end - byte + 1;
        byte = end + 1;
        if (to < 0) {
          if (other->state != ~to) return false;
        } else if (images[index(to)] < 0) {
          images[index(to)] = other->state;
          open.push_back(to);
        } else if (images[index(to)] != other->state) {
          return false;
        }
      }
    }
    return covered == wanted;
  }

  void add_component() {
    const auto base = static_cast<int32_t>(made_.states());
    for (size_t number = 0; number < parts_.size(); ++number) {
      const int32_t state = members_[index(parts_[number].front())];
      const auto final_name = [&](int32_t to) {
        const int32_t named = name(to);
        return named < 0 ? ~named : base + named;
      };
      edges_of(state, final_name);
      const bool accepting = raw_.accepting[index(state)];
      const int32_t made = add(accepting, hash_edges(accepting));
      const uint64_t shape = hash_shape(accepting, distances_[index(state)]);
      next_shape_.resize(made_.states(), kNone);
      const int32_t first = by_shape_.find(shape, [](int32_t) { return true; });
      if (first < 0)
        by_shape_.add(shape, made);
      else
        next_shape_[index(made)] = std::exchange(next_shape_[index(first)], made);
    }
    for (size_t i = 0; i < members_.size(); ++i) canonical_[index(members_[i])] = base + class_[i];
  }

  // Returns the new automaton with its states in breadth-first order.
  ByteAutomaton in_order() {
    ByteAutomaton out;
    std::vector<int32_t> renamed(made_.states(), kNone), order{canonical_[index(first_)]};
    renamed[index(order.front())] = 0;
    for (size_t i = 0; i < order.size(); ++i) {
      budget_.check();
      const size_t state = index(order[i]);
      out.starts.push_back(static_cast<uint32_t>(out.edges.size()));
      out.accepting.push_back(made_.accepting[state]);
      for (uint32_t j = made_.starts[state]; j < made_.starts[state + 1]; ++j) {
        const auto [low, high, to] = made_.edges[j];
        if (renamed[index(to)] < 0) {
          renamed[index(to)] = static_cast<int32_t>(order.size());
          order.push_back(to);
        }
        out.edges.push_back({low, high, renamed[index(to)]});
      }
    }
    out.starts.push_back(static_cast<uint32_t>(out.edges.size()));
    return out;
  }

  const ByteAutomaton& raw_;
  const int32_t first_;
  Budget& budget_;
  // For each old state: its distance to an end, and its component.
  std::vector<int32_t> distances_, component_;
  std::vector<int32_t> canonical_;  // for each finished old state: the new state
  int32_t components_ = 0;
  ByteAutomaton made_;
  HashIndex by_edges_;  // finds the new state that has given edges
  HashIndex by_shape_;  // finds the first new state with a given hash_shape()
  // For each new state: the next new state with the same hash_shape(), or -1.
  std::vector<int32_t> next_shape_;
  std::vector<ByteEdge> edges_;  // the edges of the current state

  // These lists describe the current component. The number of a member is its index in members_.
  std::vector<int32_t> members_, local_, class_;
  std::vector<std::vector<int32_t>> parts_;  // the members of each class
  std::vector<size_t> place_;  // for each element: its index in the list of its equivalence class
  std::vector<uint32_t> begins_;
  std::vector<int32_t> sources_;
};

}  // namespace

ByteAutomaton minimised(const ByteAutomaton& automaton, int32_t first, Budget& budget) {
  return Minimiser(automaton, first, budget).make();
}

}  // namespace dlm::compile
