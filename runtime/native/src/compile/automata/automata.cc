// Compiles nodes of an expression graph to automata. The code first builds a non-deterministic
// automaton, and then makes it deterministic with the subset construction.
//
// If several parts of an expression use the same node and continue with the same state, the
// automaton contains the states of this node only once. Nodes of the kinds `both`, `without` and
// `characters` are compiled first, as separate automata. The code then copies these automata into
// the non-deterministic automaton.
#include "compile/automata/automata.h"

#include <algorithm>
#include <array>
#include <utility>

#include "compile/automata/hash_index.h"
#include "compile/automata/numbers.h"

namespace dlm::compile {
namespace {

using State = uint32_t;
using Kind = Expressions::Kind;
constexpr State kEnd = 0;  // the state at the end of a text
constexpr State kUnknown = UINT32_MAX;
// The code may build an automaton with this many times the allowed number of states, because
// minimisation often removes most of them. After minimisation, the automaton must be within the
// limit.
constexpr size_t kUnminimised = 8;

// ---- UTF-8 ------------------------------------------------------------------------------------

// Builds an automaton that accepts the UTF-8 bytes of each single character in `points`. Each state
// stands for a set of values that the remaining bits of the code point may have.
class Utf8 {
 public:
  ByteAutomaton make(const CodePoints& points, Budget& budget) {
    out_.starts.push_back(0);
    // kLengths has one entry for each length of a UTF-8 sequence, from 1 to 4 bytes. `low` and
    // `high` are the first and the last code point of this length. `lead` contains the fixed bits
    // of the first byte. `bits` is the number of bits of the code point that the other bytes
    // contain.
    struct Length {
      char32_t low, high;
      int lead, bits;
    };
    constexpr Length kLengths[] = {{0, 0x7F, 0x00, 0},
                                   {0x80, 0x7FF, 0xC0, 6},
                                   {0x800, 0xFFFF, 0xE0, 12},
                                   {0x10000, 0x10FFFF, 0xF0, 18}};
    std::vector<ByteEdge> first;
    for (const auto& [low, high, lead, bits] : kLengths)
      add_edges(first, points, low, high, lead, 0, bits, budget);
    // The start state was added last. minimised() makes it state 0.
    const int32_t start = add(first, false);
    return minimised(out_, start, budget);
  }

 private:
  // Adds edges for the code points from `low` to `high` that are in `points`. The byte of an edge
  // consists of `lead` and the next bits of the code point. `base` is the code point so far: the
  // earlier bytes have set its upper bits, and the remaining `bits` bits are 0.
  void add_edges(std::vector<ByteEdge>& edges, const CodePoints& points, char32_t low,
                 char32_t high, int lead, char32_t base, int bits, Budget& budget) {
    auto range = std::lower_bound(
        points.begin(), points.end(), low,
        [](const CodePointRange& each, char32_t value) { return each.high < value; });
    while (low <= high && range != points.end() && range->low <= high) {
      budget.check();
      const char32_t from = std::max(low, range->low), to = std::min(high, range->high);
      // A block consists of all code points with the same upper bits. All blocks that are
      // completely inside the range lead to one common state. Each other block leads to a separate
      // state.
      const char32_t block = from >> bits, block_low = block << bits;
      const char32_t block_high = block_low + (char32_t{1} << bits) - 1;
      char32_t end = block;
      int32_t state;
      if (from == block_low && to >= block_high) {
        end = ((to + 1) >> bits) - 1;
        state = whole(bits, budget);
      } else {
        state = part(points, std::max(block_low, low), std::min(block_high, high), block_low, bits,
                     budget);
      }
      const auto byte = [&](char32_t value) {
        return static_cast<uint8_t>(static_cast<char32_t>(lead) + (value - (base >> bits)));
      };
      edges.push_back({byte(block), byte(end), state});
      low = ((end + 1) << bits);
      while (range != points.end() && range->high < low) ++range;
    }
  }

  // Returns the state that accepts all values of the remaining `bits` bits.
  int32_t whole(int bits, Budget& budget) {
    int32_t& made = whole_[static_cast<size_t>(bits / 6)];
    if (made >= 0) return made;
    if (bits == 0) return made = add({}, true);
    const int32_t to = whole(bits - 6, budget);
    return made = add({{0x80, 0xBF, to}}, false);
  }

  int32_t part(const CodePoints& points, char32_t low, char32_t high, char32_t base, int bits,
               Budget& budget) {
    std::vector<ByteEdge> edges;
    add_edges(edges, points, low, high, 0x80, base, bits - 6, budget);
    return add(edges, false);
  }

  int32_t add(const std::vector<ByteEdge>& edges, bool accepting) {
    for (const auto& [low, high, state] : edges) append_edge(out_, low, high, state);
    out_.starts.push_back(static_cast<uint32_t>(out_.edges.size()));
    out_.accepting.push_back(accepting);
    return static_cast<int32_t>(out_.states()) - 1;
  }

  ByteAutomaton out_;
  std::array<int32_t, 4> whole_{-1, -1, -1, -1};
};

// ---- Non-deterministic ------------------------------------------------------------------------

struct Transition {
  uint8_t low, high;
  State state;
};

// Stores the non-deterministic automaton as a list of items. Each item is kEnd, a state with
// transitions, or a branch. A branch is a list of alternative states.
struct Graph {
  struct Item {
    // The elements of the item are in `transitions` or `branches`. `first` is the index of the
    // first element, and `count` is the number of elements.
    uint32_t first, count;
    bool is_branch;
  };
  std::vector<Item> items;
  std::vector<Transition> transitions;
  std::vector<State> branches;
  State start = kEnd;

  size_t bytes() const {
    return items.size() * sizeof(Item) + transitions.size() * sizeof(Transition) +
           branches.size() * sizeof(State);
  }
};

class GraphMaker {
 public:
  using Kept = std::unordered_map<Node, std::unique_ptr<const ByteAutomaton>>;

  GraphMaker(const Expressions& expressions, const Kept& kept)
      : expressions_(expressions), kept_(kept), budget_(expressions.budget()) {}

  Graph make(Node node) {
    graph_.items.push_back({0, 0, false});  // the item with index 0 is kEnd
    graph_.start = enter(node);
    return std::move(graph_);
  }

 private:
  // A node that is being built. The builder uses its own stack of frames, because the nesting of an
  // expression can be too deep for the call stack of a thread.
  struct Frame {
    Node node;
    State follows;   // the state after the node
    uint32_t stage;  // number of construction stages that have started
    State loop;      // for unbounded repetitions: the state where the loop starts
    size_t held;     // for `either`: the choices' start states begin at this index in held_
  };

  // A node that is already built, the state that follows the node, and the node's start state.
  struct Entered {
    Node node;
    State follows, start;
  };

  // Builds the node `top`, followed by the state kEnd. Returns the start state.
  State enter(Node top) {
    std::vector<Frame> frames{{top, kEnd, 0, 0, 0}};
    State result = kUnknown;  // the start state of the node that was built last
    while (!frames.empty()) {
      budget_.check();
      budget_.check_memory(graph_.bytes() + entered_.size() * 64 + frames.size() * sizeof(Frame));
      Frame& frame = frames.back();
      const Node node = frame.node;
      if (frame.stage == 0) {
        const int32_t known = find_entered(node, frame.follows);
        if (known >= 0) {
          result = entered_[index(known)].start;
          frames.pop_back();
          continue;
        }
      }
      State done = kUnknown;
      const uint32_t stage = frame.stage++;
      const State follows = frame.follows;
      switch (expressions_.kind(node)) {
        case Kind::nothing:
          done = add_branch({});
          break;
        case Kind::empty:
          done = follows;
          break;
        case Kind::bytes:
          done = add_text(expressions_.text(node), follows);
          break;
        case Kind::set:
          done = add_set(expressions_.byte_set(node), follows);
          break;
        case Kind::machine:
          done = add_copy(expressions_.automaton(node), follows);
          break;
        case Kind::characters:
        case Kind::both:
        case Kind::without:
          done = add_copy(*kept_.at(node), follows);
          break;
        case Kind::sequence:
          if (stage == 0)
            frames.push_back({expressions_.second(node), follows, 0, 0, 0});
          else if (stage == 1)
            frames.push_back({expressions_.first(node), result, 0, 0, 0});
          else
            done = result;
          break;
        case Kind::either: {
          const std::vector<Node>& choices = expressions_.choices(node);
          if (stage == 0)
            frame.held = held_.size();
          else
            held_.push_back(result);
          if (stage < choices.size()) {
            frames.push_back({choices[stage], follows, 0, 0, 0});
          } else {
            const auto first = held_.begin() + static_cast<ptrdiff_t>(frames.back().held);
            done = add_branch({first, held_.end()});
            held_.erase(first, held_.end());
          }
          break;
        }
        case Kind::repeat:
          done = repeat(frames, stage, result);
          break;
      }
      if (done == kUnknown) continue;
      // `frames` may grow in the code above, but only if `done` is unknown. So the last frame is
      // still the frame of `node`.
      entered_index_.add(mixed(node, follows), static_cast<int32_t>(entered_.size()));
      entered_.push_back({node, follows, done});
      result = done;
      frames.pop_back();
    }
    return result;
  }

  // Builds a repetition in stages. If the repetition needs another copy of the repeated part,
  // pushes a frame for this copy and returns kUnknown. Otherwise returns the start state of the
  // repetition.
  State repeat(std::vector<Frame>& frames, uint32_t stage, State result) {
    Frame& frame = frames.back();
    const Node part = expressions_.first(frame.node);
    const uint32_t low = expressions_.low(frame.node), high = expressions_.high(frame.node);
    if (high == kUnbounded) {
      // Stage 0 creates the loop: a branch to the repeated part and to the state after the
      // repetition. After the repeated part, a text continues at the branch again.
      if (stage == 0) {
        frame.loop = add_branch({kUnknown, frame.follows});
        frames.push_back({part, frame.loop, 0, 0, 0});
        return kUnknown;
      }
      if (stage == 1) {
        graph_.branches[graph_.items[frame.loop].first] = result;
        if (low == 0) return frame.loop;
      }
      // At this line, the code has built `stage` copies of the repeated part, including the copy in
      // the loop.
      if (stage >= low) return result;
      frames.push_back({part, result, 0, 0, 0});
      return kUnknown;
    }
    budget_.check_states(high);  // every repetition needs at least one state
    State next = stage == 0 ? frame.follows : result;
    if (stage > 0 && stage <= high - low) next = add_branch({result, frame.follows});
    if (stage == high) return next;
    frames.push_back({part, next, 0, 0, 0});
    return kUnknown;
  }

  int32_t find_entered(Node node, State follows) const {
    return entered_index_.find(mixed(node, follows), [&](int32_t number) {
      return entered_[index(number)].node == node && entered_[index(number)].follows == follows;
    });
  }

  State add_branch(const std::vector<State>& states) {
    graph_.items.push_back({static_cast<uint32_t>(graph_.branches.size()),
                            static_cast<uint32_t>(states.size()), true});
    graph_.branches.insert(graph_.branches.end(), states.begin(), states.end());
    return static_cast<State>(graph_.items.size() - 1);
  }

  // Adds a state without transitions. add_transition() then adds transitions to the state that was
  // added last.
  State add_state() {
    graph_.items.push_back({static_cast<uint32_t>(graph_.transitions.size()), 0, false});
    return static_cast<State>(graph_.items.size() - 1);
  }
  void add_transition(uint8_t low, uint8_t high, State state) {
    graph_.transitions.push_back({low, high, state});
    ++graph_.items.back().count;
  }

  State add_text(const std::string& text, State follows) {
    for (auto each = text.rbegin(); each != text.rend(); ++each) {
      const auto byte = static_cast<uint8_t>(*each);
      const State state = add_state();
      add_transition(byte, byte, follows);
      follows = state;
    }
    return follows;
  }

  State add_set(const ByteSet& bytes, State follows) {
    const State state = add_state();
    for (size_t byte = 0; byte < 256; ++byte) {
      if (!bytes[byte]) continue;
      size_t last = byte;
      while (last + 1 < 256 && bytes[last + 1]) ++last;
      add_transition(static_cast<uint8_t>(byte), static_cast<uint8_t>(last), follows);
      byte = last;
    }
    return state;
  }

  // Copies an automaton into the graph. From each accepting state of the copy, a text may continue
  // with `follows`.
  State add_copy(const ByteAutomaton& part, State follows) {
    if (part.is_empty()) return add_branch({});
    const size_t count = part.states();
    const auto base = static_cast<State>(graph_.items.size());
    const auto degree = [&](size_t state) { return part.starts[state + 1] - part.starts[state]; };
    // The copied states are the first new items. After these states, there is one branch for each
    // accepting state that has edges.
    std::vector<State> names(count);
    State next = base + static_cast<State>(count);
    for (size_t state = 0; state < count; ++state)
      names[state] = !part.accepting[state] ? base + static_cast<State>(state)
                     : degree(state) == 0   ? follows
                                            : next++;
    for (size_t state = 0; state < count; ++state) {
      budget_.check();
      add_state();
      for (uint32_t i = part.starts[state]; i < part.starts[state + 1]; ++i)
        add_transition(part.edges[i].low, part.edges[i].high,
                       names[static_cast<size_t>(part.edges[i].state)]);
    }
    for (size_t state = 0; state < count; ++state)
      if (names[state] >= base + count) add_branch({base + static_cast<State>(state), follows});
    return names.front();
  }

  const Expressions& expressions_;
  const Kept& kept_;
  Budget& budget_;
  Graph graph_;
  std::vector<Entered> entered_;
  HashIndex entered_index_;
  std::vector<State> held_;
};

// ---- Deterministic ----------------------------------------------------------------------------

// Performs the subset construction. A subset is a set of states that one text can reach in the
// non-deterministic automaton. Each subset becomes one state of the deterministic automaton. A
// subset is stored as an ascending list of those of its states that have transitions. The list may
// also contain kEnd.
class Subsets {
 public:
  Subsets(const Graph& graph, Budget& budget)
      : graph_(graph),
        budget_(budget),
        seen_(graph.items.size(), 0),
        alone_(graph.items.size(), -1) {}

  ByteAutomaton make() {
    number_of(&graph_.start, 1);
    for (size_t at = 0; at + 1 < begins_.size(); ++at) {
      budget_.check();
      const size_t states = begins_.size() - 1;
      if (states > kUnminimised * budget_.limits().states) budget_.check_states(states);
      budget_.check_memory(states * 64 + content_.size() * sizeof(State) +
                           out_.edges.size() * sizeof(ByteEdge) + graph_.bytes());
      out_.starts.push_back(static_cast<uint32_t>(out_.edges.size()));
      out_.accepting.push_back(begins_[at] < begins_[at + 1] && content_[begins_[at]] == kEnd);
      add_edges(at);
    }
    out_.starts.push_back(static_cast<uint32_t>(out_.edges.size()));
    return std::move(out_);
  }

 private:
  void add_edges(size_t at) {
    const size_t first = begins_[at], last = begins_[at + 1];
    if (last - first == 1) {
      const Graph::Item& item = graph_.items[content_[first]];
      for (uint32_t i = 0; i < item.count; ++i) {
        const auto [low, high, state] = graph_.transitions[item.first + i];
        append_edge(out_, low, high, number_of(&state, 1));
      }
      return;
    }
    // This code sorts the transitions of all states by their first byte, and then visits the bytes
    // in order. `active_` contains the transitions whose byte range contains the current byte.
    transitions_.clear();
    for (size_t i = first; i < last; ++i) {
      const Graph::Item& item = graph_.items[content_[i]];
      transitions_.insert(transitions_.end(), graph_.transitions.begin() + item.first,
                          graph_.transitions.begin() + item.first + item.count);
    }
    std::sort(transitions_.begin(), transitions_.end(),
              [](const Transition& a, const Transition& b) { return a.low < b.low; });
    active_.clear();
    size_t next = 0;
    int byte = 0;
    while (next < transitions_.size() || !active_.empty()) {
      budget_.check();
      if (active_.empty()) byte = transitions_[next].low;
      while (next < transitions_.size() && transitions_[next].low <= byte)
        active_.push_back(transitions_[next++]);
      int end = next < transitions_.size() ? transitions_[next].low - 1 : 255;
      targets_.clear();
      for (const Transition& each : active_) {
        end = std::min<int>(end, each.high);
        targets_.push_back(each.state);
      }
      append_edge(out_, static_cast<uint8_t>(byte), static_cast<uint8_t>(end),
                  number_of(targets_.data(), targets_.size()));
      byte = end + 1;
      active_.erase(std::remove_if(active_.begin(), active_.end(),
                                   [&](const Transition& each) { return each.high < byte; }),
                    active_.end());
    }
  }

  // Returns the number of the subset that consists of the given states. If one of the given states
  // is a branch, the subset contains the alternatives of the branch instead.
  int32_t number_of(const State* states, size_t count) {
    if (count == 1 && alone_[states[0]] >= 0) return alone_[states[0]];
    ++round_;
    subset_.clear();
    open_.assign(states, states + count);
    while (!open_.empty()) {
      const State state = open_.back();
      open_.pop_back();
      if (seen_[state] == round_) continue;
      seen_[state] = round_;
      const Graph::Item& item = graph_.items[state];
      if (!item.is_branch) {
        subset_.push_back(state);
        continue;
      }
      budget_.check();
      open_.insert(open_.end(), graph_.branches.begin() + item.first,
                   graph_.branches.begin() + item.first + item.count);
    }
    const int32_t number = subset_.size() == 1 ? number_alone(subset_[0]) : number_together();
    if (count == 1) alone_[states[0]] = number;
    return number;
  }

  int32_t number_alone(State state) {
    if (alone_[state] < 0) alone_[state] = add_subset();
    return alone_[state];
  }

  int32_t number_together() {
    std::sort(subset_.begin(), subset_.end());
    uint64_t hash = subset_.size();
    for (const State state : subset_) hash = mixed(hash, state);
    int32_t number = numbers_.find(hash, [&](int32_t each) {
      const auto at = begins_.begin() + each;
      const auto first = content_.begin();
      return std::equal(subset_.begin(), subset_.end(), first + static_cast<ptrdiff_t>(at[0]),
                        first + static_cast<ptrdiff_t>(at[1]));
    });
    if (number < 0) numbers_.add(hash, number = add_subset());
    return number;
  }

  int32_t add_subset() {
    content_.insert(content_.end(), subset_.begin(), subset_.end());
    begins_.push_back(content_.size());
    return static_cast<int32_t>(begins_.size()) - 2;
  }

  const Graph& graph_;
  Budget& budget_;
  ByteAutomaton out_;
  std::vector<State> content_;  // the states of all subsets, one subset after another
  // Subset s consists of content_[begins_[s]] to content_[begins_[s + 1] - 1].
  std::vector<size_t> begins_{0};
  // Maps the content of a subset to the subset's number. alone_ contains the numbers of the subsets
  // of exactly one state.
  HashIndex numbers_;
  std::vector<uint32_t> seen_;  // for each state: the round of its last visit
  // For each state: the number of the subset that contains only this state, or -1 if there is no
  // such subset yet.
  std::vector<int32_t> alone_;
  uint32_t round_ = 0;
  std::vector<State> subset_, open_, targets_;
  std::vector<Transition> transitions_, active_;
};

}  // namespace

const ByteAutomaton& Automata::of(Node node) {
  Budget& budget = expressions_.budget();
  // The parts of a node have lower indices than the node itself. So if the nodes are compiled in
  // ascending order, the parts of each node are compiled first.
  std::vector<Node> needed, open{node};
  std::vector<uint8_t> seen(expressions_.size(), 0);
  while (!open.empty()) {
    const Node at = open.back();
    open.pop_back();
    if (seen[at] || kept_.count(at) > 0) continue;
    budget.check();
    seen[at] = 1;
    switch (expressions_.kind(at)) {
      case Kind::both:
      case Kind::without:
        needed.push_back(expressions_.first(at));
        needed.push_back(expressions_.second(at));
        needed.push_back(at);
        [[fallthrough]];
      case Kind::sequence:
        open.push_back(expressions_.first(at));
        open.push_back(expressions_.second(at));
        break;
      case Kind::characters:
        needed.push_back(at);
        break;
      case Kind::repeat:
        open.push_back(expressions_.first(at));
        break;
      case Kind::either: {
        const std::vector<Node>& choices = expressions_.choices(at);
        open.insert(open.end(), choices.begin(), choices.end());
        break;
      }
      default:
        break;
    }
  }
  needed.push_back(node);
  std::sort(needed.begin(), needed.end());
  for (const Node at : needed) {
    if (kept_.count(at) > 0) continue;
    ByteAutomaton made;
    switch (expressions_.kind(at)) {
      case Kind::characters:
        made = Utf8().make(expressions_.code_points(at), budget);
        break;
      case Kind::both:
        made = intersection(*kept_.at(expressions_.first(at)), *kept_.at(expressions_.second(at)),
                            budget);
        break;
      case Kind::without:
        made = difference(*kept_.at(expressions_.first(at)), *kept_.at(expressions_.second(at)),
                          budget);
        break;
      default:
        made =
            minimised(Subsets(GraphMaker(expressions_, kept_).make(at), budget).make(), 0, budget);
    }
    kept_bytes_ += made.states() * 8 + made.edges.size() * sizeof(ByteEdge);
    budget.check_memory(kept_bytes_);
    kept_.emplace(at, std::make_unique<const ByteAutomaton>(std::move(made)));
  }
  return *kept_.at(node);
}

}  // namespace dlm::compile
