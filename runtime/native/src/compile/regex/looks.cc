#include "compile/regex/looks.h"

#include <algorithm>
#include <utility>

#include "base/utf8.h"
#include "compile/regex/unicode.h"

namespace dlm::compile {
namespace {

// The largest number of character classes that the compiler supports before or after a position.
constexpr size_t kMostClasses = 64;
constexpr size_t kMostBoundaries = 16;  // largest number of states of the automaton in close()
// The largest supported number of repetitions of a part that has conditions.
constexpr uint32_t kMostRepetitions = 1000;
constexpr int kDeepest = 2000;  // largest depth of nested calls
constexpr int kDeepestEdge = 64;

// Increases a depth counter by 1 while this object exists. Throws an error if the calls are nested
// too deeply.
struct Deeper {
  Deeper(int& depth, const std::string& subject) : depth_(depth) {
    if (depth_ == kDeepest)
      fail(DLM_INVALID_ARGUMENT, "%s: anchors or look-around are nested too deeply",
           subject.c_str());
    ++depth_;
  }
  ~Deeper() { --depth_; }
  int& depth_;
};

}  // namespace

Looks::Looks(Expressions& expressions, Spell spell, std::string subject)
    : expressions_(expressions),
      spell_(spell),
      subject_(std::move(subject)),
      before_{complement({})},
      after_{complement({})} {
  any_texts_ = expressions_.repeat(spell_(expressions_, complement({})), 0, kUnbounded);
}

void Looks::refuse(const char* what) const {
  fail(DLM_INVALID_ARGUMENT, "%s: %s", subject_.c_str(), what);
}

// ---- Building ----

Looks::Piece Looks::add(Item item) {
  for (const Piece part : item.parts) {
    const Item& other = items_[part.item];
    item.looks_before |= other.looks_before;
    item.looks_after |= other.looks_after;
    item.looks_far |= other.looks_far;
  }
  expressions_.budget().check();
  expressions_.budget().check_memory(items_.size() * sizeof(Item));
  items_.push_back(std::move(item));
  return {0, static_cast<uint32_t>(items_.size() - 1)};
}

Looks::Piece Looks::look(Look look) {
  Item item{Kind::look};
  for (size_t kind = 1; kind < 4; ++kind) {
    item.looks_before |= look.holds[kind] != look.holds[0];
    for (size_t before = 0; before < 4; ++before)
      item.looks_after |= look.holds[before][kind] != look.holds[before][0];
  }
  divide(look.before, before_);
  divide(look.after, after_);
  item.look = std::move(look);
  return add(std::move(item));
}

Looks::Piece Looks::ahead(Piece piece, bool is_negative) {
  Item item{Kind::ahead};
  item.parts = {piece};
  item.looks_far = true;
  item.is_negative = is_negative;
  return add(std::move(item));
}

Looks::Piece Looks::sequence(std::vector<Piece> parts) {
  // Merges neighbouring parts that have no conditions into one node, from right to left.
  std::vector<Piece> merged;
  for (auto part = parts.rbegin(); part != parts.rend(); ++part) {
    if (part->item == 0 && !merged.empty() && merged.back().item == 0)
      merged.back().node = expressions_.sequence(part->node, merged.back().node);
    else
      merged.push_back(*part);
  }
  if (merged.empty()) return plain(expressions_.empty());
  if (merged.size() == 1) return merged[0];
  std::reverse(merged.begin(), merged.end());
  Item item{Kind::sequence};
  item.parts = std::move(merged);
  return add(std::move(item));
}

Looks::Piece Looks::either(std::vector<Piece> choices) {
  std::vector<Node> nodes;
  std::vector<Piece> kept;
  for (const Piece choice : choices)
    choice.item == 0 ? nodes.push_back(choice.node) : kept.push_back(choice);
  if (kept.empty()) return plain(expressions_.either(std::move(nodes)));
  if (!nodes.empty()) kept.push_back(plain(expressions_.either(std::move(nodes))));
  if (kept.size() == 1) return kept[0];
  Item item{Kind::either};
  item.parts = std::move(kept);
  return add(std::move(item));
}

Looks::Piece Looks::repeat(Piece part, uint32_t low, uint32_t high) {
  if (part.item == 0) return plain(expressions_.repeat(part.node, low, high));
  if (low > kMostRepetitions || (high != kUnbounded && high > kMostRepetitions))
    refuse("an anchor or look-around is repeated more than 1,000 times");
  Item item{Kind::repeat};
  item.parts = {part};
  item.low = low;
  item.high = high;
  return add(std::move(item));
}

// Splits the classes in `classes`. Afterwards, each set in `sets` contains either all characters of
// a class or none of them.
void Looks::divide(const std::array<CodePoints, 2>& sets, std::vector<CodePoints>& classes) const {
  for (const CodePoints& set : sets) {
    if (set.empty()) continue;
    const CodePoints others = complement(set);
    std::vector<CodePoints> divided;
    for (const CodePoints& each : classes)
      for (CodePoints part : {intersection(each, set), intersection(each, others)})
        if (!part.empty()) divided.push_back(std::move(part));
    classes = std::move(divided);
    if (classes.size() > kMostClasses) refuse("too many different conditions on characters");
  }
}

Node Looks::node(Piece piece) {
  return rest_from(piece, Rest(before_.size() + 1, expressions_.empty()))[0];
}

// ---- Conditions ----

size_t Looks::kind_of(const std::array<CodePoints, 2>& sets, const std::vector<CodePoints>& classes,
                      size_t place) {
  if (place == 0) return 0;
  const char32_t point = classes[place - 1].front().low;
  return contains(sets[0], point) ? 1 : contains(sets[1], point) ? 2 : 3;
}

bool Looks::holds(const Look& look, size_t before, size_t after) const {
  return look.holds[kind_of(look.before, before_, before)][kind_of(look.after, after_, after)];
}

Node Looks::not_empty(Node node, int depth) {
  using K = Expressions::Kind;
  if (!expressions_.is_nullable(node)) return node;
  if (node == expressions_.empty()) return expressions_.nothing();
  if (depth < kDeepestEdge) {
    if (expressions_.kind(node) == K::repeat) {
      const Node part = expressions_.first(node);
      const uint32_t high = expressions_.high(node);
      if (!expressions_.is_nullable(part)) return expressions_.repeat(part, 1, high);
      return expressions_.repeat(not_empty(part, depth + 1), 1, high);
    }
    if (expressions_.kind(node) == K::either) {
      std::vector<Node> choices;
      for (const Node choice : std::vector<Node>(expressions_.choices(node)))
        choices.push_back(not_empty(choice, depth + 1));
      return expressions_.either(std::move(choices));
    }
  }
  return expressions_.without(node, expressions_.empty());
}

Node Looks::edged(Node node, Side side, uint64_t classes) {
  const std::vector<CodePoints>& all = side == Side::start ? after_ : before_;
  if (all.size() == 1 && classes != 0) return not_empty(node);
  const auto [known, is_new] = known_edges_.try_emplace({node, side, classes}, 0);
  if (!is_new) return known->second;
  CodePoints points;
  for (size_t i = 0; i < all.size(); ++i)
    if ((classes >> i & 1) != 0) points.insert(points.end(), all[i].begin(), all[i].end());
  points = normalised(std::move(points));
  const Node made = points == complement({}) ? not_empty(node) : edged(node, side, points, 0);
  return known->second = made;
}

Node Looks::edged(Node node, Side side, const CodePoints& points, int depth) {
  using K = Expressions::Kind;
  Expressions& e = expressions_;
  const bool is_start = side == Side::start;
  e.budget().check();
  if (node == e.nothing() || node == e.empty()) return e.nothing();
  const K kind = e.kind(node);
  if (kind == K::characters) return e.characters(intersection(e.code_points(node), points));
  // A text with a backslash may contain escapes. The end of this function handles such texts, with
  // automata that compare whole escaped characters.
  if (kind == K::bytes && e.text(node).find('\\') == std::string::npos) {
    const std::string& text = e.text(node);
    size_t at = 0;
    if (!is_start)
      for (at = text.size() - 1; continues_char(text[at]);) --at;
    return contains(points, next_char(text, at)) ? node : e.nothing();
  }
  if (depth < kDeepestEdge) {
    if (kind == K::either) {
      std::vector<Node> choices;
      for (const Node choice : std::vector<Node>(e.choices(node)))
        choices.push_back(edged(choice, side, points, depth + 1));
      return e.either(std::move(choices));
    }
    if (kind == K::sequence) {
      const Node first = e.first(node), second = e.second(node);
      if (is_start) {
        const Node made = e.sequence(edged(first, side, points, depth + 1), second);
        if (!e.is_nullable(first)) return made;
        return e.either(made, edged(second, side, points, depth + 1));
      }
      const Node made = e.sequence(first, edged(second, side, points, depth + 1));
      if (!e.is_nullable(second)) return made;
      return e.either(made, edged(first, side, points, depth + 1));
    }
    if (kind == K::repeat) {
      const uint32_t low = e.low(node), high = e.high(node);
      const Node part = e.first(node), edge = edged(part, side, points, depth + 1);
      const Node others =
          e.repeat(part, low == 0 ? 0 : low - 1, high == kUnbounded ? kUnbounded : high - 1);
      return is_start ? e.sequence(edge, others) : e.sequence(others, edge);
    }
  }
  const Node edge = spell_(e, points);
  return e.both(node, is_start ? e.sequence(edge, any_texts_) : e.sequence(any_texts_, edge));
}

// ---- Texts from a position to the end ----

Looks::Rest Looks::joined(const Rest& first, const Rest& second) {
  Rest made;
  for (size_t i = 0; i < first.size(); ++i)
    made.push_back(expressions_.either(first[i], second[i]));
  return made;
}

Looks::Rest Looks::rest_from(Piece piece, const Rest& rest) {
  const Deeper deeper(depth_, subject_);
  expressions_.budget().check();
  if (piece.item == 0) return rest_from_node(piece.node, rest);
  // The reference stays valid, because this function adds no items to items_.
  const Item& item = items_[piece.item];
  switch (item.kind) {
    case Kind::look:
      return rest_from_look(item.look, rest);
    case Kind::ahead:
      return rest_from_ahead(item, rest);
    case Kind::sequence: {
      Rest made = rest;
      for (auto part = item.parts.rbegin(); part != item.parts.rend(); ++part)
        made = rest_from(*part, made);
      return made;
    }
    case Kind::either: {
      Rest made(rest.size(), expressions_.nothing());
      for (const Piece part : item.parts) made = joined(made, rest_from(part, rest));
      return made;
    }
    case Kind::repeat:
      break;
  }
  return rest_from_repeat(item, piece, rest);
}

Looks::Rest Looks::rest_from_node(Node node, const Rest& rest) {
  Expressions& e = expressions_;
  if (node == e.empty()) return rest;
  if (std::all_of(rest.begin(), rest.end(), [&](Node each) { return each == rest[0]; }))
    return Rest(rest.size(), e.sequence(node, rest[0]));
  // For each node that may follow: the classes of the character before it, as a bit mask.
  std::map<Node, uint64_t> targets;
  for (size_t before = 1; before < rest.size(); ++before)
    targets[rest[before]] |= uint64_t{1} << (before - 1);
  std::vector<Node> choices;
  for (const auto& [target, classes] : targets)
    if (target != e.nothing())
      choices.push_back(e.sequence(edged(node, Side::end, classes), target));
  const Node made = e.either(std::move(choices));
  Rest all(rest.size(), made);
  if (e.is_nullable(node))
    for (size_t before = 0; before < rest.size(); ++before)
      all[before] = e.either(made, rest[before]);
  return all;
}

Looks::Rest Looks::rest_from_look(const Look& look, const Rest& rest) {
  Rest made = rest;
  for (size_t before = 0; before < rest.size(); ++before) {
    uint64_t classes = 0;
    for (size_t after = 1; after <= after_.size(); ++after)
      if (holds(look, before, after)) classes |= uint64_t{1} << (after - 1);
    const bool holds_at_end = holds(look, before, 0);
    const uint64_t all = after_.size() == 64 ? ~uint64_t{0} : (uint64_t{1} << after_.size()) - 1;
    if (holds_at_end && classes == all) continue;
    Node kept = classes == 0 ? expressions_.nothing() : edged(rest[before], Side::start, classes);
    if (holds_at_end && expressions_.is_nullable(rest[before]))
      kept = expressions_.either(kept, expressions_.empty());
    made[before] = kept;
  }
  return made;
}

Looks::Rest Looks::rest_from_ahead(const Item& item, const Rest& rest) {
  const Rest starts = rest_from(item.parts[0], Rest(rest.size(), any_texts_));
  Rest made;
  for (size_t i = 0; i < rest.size(); ++i)
    made.push_back(item.is_negative ? expressions_.without(rest[i], starts[i])
                                    : expressions_.both(rest[i], starts[i]));
  return made;
}

Looks::Rest Looks::rest_from_repeat(const Item& item, Piece piece, const Rest& rest) {
  Rest made = rest;
  if (item.high == kUnbounded) {
    if (item.looks_far)
      refuse("look-ahead of more than one character inside a repetition without end");
    made = rest_from_endless(piece, rest);
  } else {
    for (uint32_t i = item.low; i < item.high; ++i) {
      Rest longer = joined(rest, rest_from(item.parts[0], made));
      if (longer == made) break;
      made = std::move(longer);
    }
  }
  for (uint32_t i = 0; i < item.low; ++i) made = rest_from(item.parts[0], made);
  return made;
}

// Returns the texts of any number of repetitions of a part, followed by `rest`. The result includes
// the texts with zero repetitions. If the part must repeat at least n times, the caller must add n
// repetitions before the result.
Looks::Rest Looks::rest_from_endless(Piece piece, const Rest& rest) {
  Expressions& e = expressions_;
  const Item& item = items_[piece.item];
  const size_t last = classes_after(item);
  const bool is_uniform =
      std::all_of(rest.begin() + 1, rest.end(), [&](Node each) { return each == rest[1]; });
  Rest made;
  for (size_t before = 0; before < rest.size(); ++before) {
    if (!item.looks_after) {
      made.push_back(rest_from_node(endless(piece, before, 0), rest)[before]);
      continue;
    }
    std::vector<Node> choices{rest[before]};  // the texts with zero repetitions
    for (size_t end = 1; end < rest.size(); ++end) {
      for (size_t after = 0; after <= last; ++after) {
        Node head = not_empty(endless(piece, before, after));
        if (!is_uniform) head = ending(head, end);
        const Node behind = after > 0                  ? starting(rest[end], after)
                            : e.is_nullable(rest[end]) ? e.empty()
                                                       : e.nothing();
        choices.push_back(e.sequence(head, behind));
      }
      if (is_uniform) break;
    }
    made.push_back(e.either(std::move(choices)));
  }
  return made;
}

// ---- The texts that a piece matches between two characters of given classes ----

Node Looks::texts(Piece piece, size_t before, size_t after) {
  if (piece.item == 0) return piece.node;
  const Deeper deeper(depth_, subject_);
  Item& item = items_[piece.item];
  if (!item.looks_before) before = 0;
  if (!item.looks_after) after = 0;
  switch (item.kind) {
    case Kind::look:
      return holds(item.look, before, after) ? expressions_.empty() : expressions_.nothing();
    case Kind::ahead:
      refuse("look-ahead of more than one character inside a repetition without end");
    case Kind::sequence:
      return tail(item, piece, 0, before, after);
    case Kind::either: {
      std::vector<Node> choices;
      for (const Piece part : item.parts) choices.push_back(texts(part, before, after));
      return expressions_.either(std::move(choices));
    }
    case Kind::repeat:
      break;
  }
  return repeated(piece, item.low, item.high, before, after);
}

template <class First, class Second>
Node Looks::in_turn(const First& first, bool first_looks_after, const Second& second,
                    bool second_looks_before, size_t before, size_t after) {
  Expressions& e = expressions_;
  if (!first_looks_after && !second_looks_before)
    return e.sequence(first(before, size_t{0}), second(size_t{0}, after));
  const size_t ends = second_looks_before ? before_.size() : 1;
  const size_t starts = first_looks_after ? after_.size() : 1;
  const auto end_with = [&](Node node, size_t end) {
    return second_looks_before ? ending(node, end) : not_empty(node);
  };
  const auto start_with = [&](Node node, size_t start) {
    return first_looks_after ? starting(node, start) : not_empty(node);
  };
  std::vector<Node> choices;
  const Node one = first(before, after), other = second(before, after);
  for (size_t end = 1; end <= ends; ++end)
    for (size_t start = 1; start <= starts; ++start)
      choices.push_back(
          e.sequence(end_with(first(before, start), end), start_with(second(end, after), start)));
  for (size_t start = 1; start <= starts; ++start)
    if (e.is_nullable(first(before, start))) choices.push_back(start_with(other, start));
  for (size_t end = 1; end <= ends; ++end)
    if (e.is_nullable(second(end, after))) choices.push_back(end_with(one, end));
  if (e.is_nullable(one) && e.is_nullable(other)) choices.push_back(e.empty());
  return e.either(std::move(choices));
}

// Returns the texts of the last parts of a sequence. The first of these parts has the index `from`.
Node Looks::tail(const Item& item, Piece piece, size_t from, size_t before, size_t after) {
  const Piece part = item.parts[from];
  if (from + 1 == item.parts.size()) return texts(part, before, after);
  const Deeper deeper(depth_, subject_);
  const Key key{piece.item, from, 0, before, after};
  if (const auto known = known_.find(key); known != known_.end()) return known->second;
  const bool looks = std::any_of(item.parts.begin() + static_cast<std::ptrdiff_t>(from) + 1,
                                 item.parts.end(), [&](Piece each) { return looks_before(each); });
  const Node made = in_turn(
      [&](size_t b, size_t a) { return texts(part, b, a); }, looks_after(part),
      [&](size_t b, size_t a) { return tail(item, piece, from + 1, b, a); }, looks, before, after);
  return known_[key] = made;
}

Node Looks::repeated(Piece piece, uint32_t low, uint32_t high, size_t before, size_t after) {
  if (high == 0) return expressions_.empty();
  if (low == 0 && high == kUnbounded) return endless(piece, before, after);
  const Deeper deeper(depth_, subject_);
  expressions_.budget().check();
  const Key key{piece.item, low, high, before, after};
  if (const auto known = known_.find(key); known != known_.end()) return known->second;
  const Item& item = items_[piece.item];
  const Piece part = item.parts[0];
  Node made = in_turn([&](size_t b, size_t a) { return texts(part, b, a); }, item.looks_after,
                      [&](size_t b, size_t a) {
                        return repeated(piece, low == 0 ? 0 : low - 1,
                                        high == kUnbounded ? high : high - 1, b, a);
                      },
                      item.looks_before, before, after);
  if (low == 0) made = expressions_.either(made, expressions_.empty());
  return known_[key] = made;
}

// Returns the texts of any number of repetitions of a part. The function treats the repetitions as
// an automaton. There is a position after each repetition. A state of the automaton consists of the
// class of the character before this position and the class of the character after it. The texts
// that may follow depend only on this state.
Node Looks::endless(Piece piece, size_t before, size_t after) {
  Expressions& e = expressions_;
  Item& item = items_[piece.item];
  const Key key{piece.item, 0, kUnbounded, before, after};
  if (const auto known = known_.find(key); known != known_.end()) return known->second;
  if (item.steps.empty()) close(item);
  const Piece part = item.parts[0];
  const size_t ends = classes_before(item), starts = classes_after(item), places = ends * starts;
  std::vector<Node> choices{e.empty(), not_empty(texts(part, before, after))};
  for (size_t i = 0; i < places; ++i) {
    Node head = not_empty(texts(part, before, i % starts + 1));
    if (item.looks_before) head = ending(head, i / starts + 1);
    std::vector<Node> tails;
    for (size_t j = 0; j < places; ++j) {
      Node last = not_empty(texts(part, j / starts + 1, after));
      if (item.looks_after) last = starting(last, j % starts + 1);
      tails.push_back(e.sequence(item.steps[i * places + j], last));
    }
    choices.push_back(e.sequence(head, e.either(std::move(tails))));
  }
  return known_[key] = e.either(std::move(choices));
}

// Fills item.steps. endless() explains the states. For each pair of states, item.steps contains the
// texts of any number of repetitions that lead from the first state to the second. The code uses
// Kleene's algorithm (1956). Each round of this algorithm also allows paths through one more state.
void Looks::close(Item& item) {
  Expressions& e = expressions_;
  const Piece part = item.parts[0];
  const size_t ends = classes_before(item), starts = classes_after(item), places = ends * starts;
  if (places > kMostBoundaries)
    refuse("too many different conditions on characters inside a repetition without end");
  std::vector<Node> steps(places * places);
  for (size_t i = 0; i < places; ++i)
    for (size_t j = 0; j < places; ++j) {
      Node step = not_empty(texts(part, i / starts + 1, j % starts + 1));
      if (item.looks_before) step = ending(step, j / starts + 1);
      if (item.looks_after) step = starting(step, i % starts + 1);
      steps[i * places + j] = step;
    }
  for (size_t via = 0; via < places; ++via) {
    const std::vector<Node> before = steps;
    const Node loops = e.repeat(before[via * places + via], 0, kUnbounded);
    for (size_t i = 0; i < places; ++i) {
      e.budget().check();
      for (size_t j = 0; j < places; ++j)
        steps[i * places + j] =
            e.either(before[i * places + j],
                     e.sequence({before[i * places + via], loops, before[via * places + j]}));
    }
  }
  for (size_t i = 0; i < places; ++i)
    steps[i * places + i] = e.either(steps[i * places + i], e.empty());
  item.steps = std::move(steps);
}

}  // namespace dlm::compile
