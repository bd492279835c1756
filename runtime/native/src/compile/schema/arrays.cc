// Builds the regular language (set of texts) of the arrays of one case. writer.h explains cases. In
// a JSON Schema, each of the first items of an array can have a different schema. All remaining
// items have the same schema.
#include <algorithm>

#include "compile/schema/keywords.h"
#include "compile/schema/writer.h"

namespace dlm::compile::schema {
namespace {

// The largest number of `contains` schemas that array_with_matches() supports.
constexpr size_t kMostMatches = 3;
// Largest number of states of the automaton that array_with_matches() builds.
constexpr size_t kMostStates = 20'000;
// If there are more possible items than this, unique_array() allows them in one order only.
constexpr size_t kMostMixed = 6;
// Largest number of integers that finite() lists for one range.
constexpr uint64_t kMostIntegers = 100;

}  // namespace

// Returns the formula for the item with the given index. The second value of the result is true if
// a schema describes this item.
std::pair<Formula, bool> Writer::item(const Case& found, size_t index) {
  std::vector<Formula> parts;
  bool is_described = false;
  const auto add = [&](const Schema& schema, bool positive) {
    parts.push_back(formulas_.of(schema, positive));
    is_described = true;
  };
  for (const Formula part : found.atoms) {
    const Term& term = formulas_[part];
    if (term.atom == Atom::items) {
      const json::Value* const schema = item_schemas(*term.schema).at(index);
      if (schema != nullptr) add(document_.schema(*schema), true);
    } else if (term.atom == Atom::item && term.low == index) {
      add(*term.schema, term.inner);
    } else if (term.atom == Atom::unevaluated_items &&
               index >= evaluated_items(*term.schema, *term.schema, found)) {
      add(document_.schema(*(*term.schema)[Keyword::unevaluated_items]), true);
    }
  }
  return {formulas_.all(parts), is_described};
}

// Returns the number of evaluated items at the start of an array, or SIZE_MAX if all items are
// evaluated. In the specification, a schema evaluates an item if a keyword such as `items` applies
// to the item. If an inner schema evaluates an item, for example a schema in allOf, the outer
// schema evaluates the item too. The keyword unevaluatedItems applies only to the items that are
// not evaluated. `by` is the schema that contains this keyword.
size_t Writer::evaluated_items(const Schema& schema, const Schema& by, const Case& found) {
  expressions_.budget().check();
  if (schema.is_boolean()) return 0;
  const ItemSchemas items = item_schemas(schema);
  if (items.others != nullptr) return SIZE_MAX;
  if (&schema != &by && schema[Keyword::unevaluated_items] != nullptr) return SIZE_MAX;
  size_t most = items.count();
  any_applied(schema, found, kArray, [&](const json::Value& value) {
    most = std::max(most, evaluated_items(document_.schema(value), by, found));
    return false;
  });
  return most;
}

Writer::Made Writer::array(const Case& found, const Place& place) {
  uint64_t low = 0;
  uint32_t high = kUnbounded;
  size_t prefix = 0;
  std::vector<const Term*> matches;
  const Term* unique = nullptr;
  for (const Formula part : found.atoms) {
    const Term& term = formulas_[part];
    switch (term.atom) {
      case Atom::item_count:
        low = std::max<uint64_t>(low, low_count(term, Keyword::min_items));
        high = std::min(high, high_count(term, Keyword::max_items));
        break;
      case Atom::items:
        prefix = std::max(prefix, item_schemas(*term.schema).count());
        break;
      case Atom::item:
        prefix = std::max<size_t>(prefix, term.low + 1);
        break;
      case Atom::unevaluated_items: {
        const size_t count = evaluated_items(*term.schema, *term.schema, found);
        if (count != SIZE_MAX) prefix = std::max(prefix, count);
        break;
      }
      case Atom::matches:
        if (term.low > 0 || term.high != kNoLimit) matches.push_back(&term);
        break;
      case Atom::unique:
        unique = &term;
        break;
      default:
        break;
    }
  }
  if (low > high) return {};
  if (unique != nullptr && high > 1) {
    const bool is_simple = prefix == 0 && matches.empty();
    const std::optional<Made> made =
        is_simple ? unique_array(item(found, 0).first, low, high, inside(found, place))
                  : std::nullopt;
    if (made.has_value()) return *made;
    if (low > 1)
      document_.refuse(
          *unique->schema, Keyword::unique_items,
          "is only supported for items of a finite set: give the items an enum, or leave it out");
    document_.warn("schema: " + document_.place(*unique->schema->value) +
                   ": keyword 'uniqueItems' is not regular for these items: at most one item is "
                   "written. To allow more, give the items an enum, or leave out uniqueItems");
    high = 1;
  }
  const Layout::Around around = options_.layout.around(place.level, true);
  if (!matches.empty()) return array_with_matches(found, matches, place, prefix, low, high);
  const Place inner = inside(found, place);
  const size_t first = std::min<size_t>(prefix, high);
  std::vector<Node> items;
  double size = 2;
  for (size_t i = 0; i < first; ++i) {
    expressions_.budget().check();
    const auto [formula, is_described] = item(found, i);
    const Made made = value(formula, inner, is_described);
    if (made.node == expressions_.nothing()) {
      // Item i has no valid value, so the array must end before this item.
      if (low > i) return {};
      high = static_cast<uint32_t>(i);
      break;
    }
    items.push_back(made.node);
    size += made.size + 1;
  }
  Made rest;
  if (high > items.size()) {
    const auto [formula, is_described] = item(found, prefix);
    rest = value(formula, inner, is_described);
    size += rest.size * std::max<double>(1, static_cast<double>(high == kUnbounded ? low : high));
  }
  const bool has_rest = rest.node != expressions_.nothing();
  const auto count = static_cast<uint32_t>(items.size());
  if (!has_rest && low > count) return {};
  if (count == 0)
    return {container(expressions_, around, true, rest.node, static_cast<uint32_t>(low),
                      has_rest ? high : 0),
            size};
  const Node between = expressions_.bytes(around.between);
  const Node end = expressions_.sequence(expressions_.bytes(around.end), expressions_.bytes("]"));
  Node behind = end;
  if (has_rest && high > count)
    behind = expressions_.sequence(
        expressions_.repeat(expressions_.sequence(between, rest.node),
                            low > count ? static_cast<uint32_t>(low) - count : 0,
                            high == kUnbounded ? kUnbounded : high - count),
        end);
  for (uint32_t i = count; i-- > 1;) {
    behind = expressions_.sequence({between, items[i], behind});
    if (low <= i) behind = expressions_.either(end, behind);
  }
  behind = expressions_.sequence({expressions_.bytes(around.start), items[0], behind});
  if (low == 0) behind = expressions_.either(expressions_.bytes("]"), behind);
  return {expressions_.sequence(expressions_.bytes("["), behind), size};
}

// Builds the texts of arrays in which a given number of items must match the schema of `contains`.
// There may be several such schemas. The function from() builds an automaton. A state of this
// automaton consists of the number of items so far, and the number of items so far that match each
// schema. For each schema, `most` contains the largest number of matches that the automaton counts.
Writer::Made Writer::array_with_matches(const Case& found, const std::vector<const Term*>& matches,
                                        const Place& place, size_t prefix, uint64_t low,
                                        uint32_t high) {
  if (matches.size() > kMostMatches)
    document_.refuse(*matches[0]->schema, Keyword::contains,
                     "is supported up to " + std::to_string(kMostMatches) + " times for an array");
  size_t last = std::max<size_t>({prefix, 1, static_cast<size_t>(low)});
  for (const Term* const term : matches) last = std::max<size_t>(last, term->first + 1);
  if (high != kUnbounded) last = high;
  std::vector<uint64_t> most;
  double states = static_cast<double>(last + 1);
  for (const Term* const term : matches) {
    most.push_back(term->high == kNoLimit ? term->low : term->high);
    states *= static_cast<double>(most.back() + 1);
  }
  if (states > kMostStates)
    document_.refuse(*matches[0]->schema, Keyword::contains,
                     "needs too many states here: make the counts of items smaller");
  const Place inner = inside(found, place);
  const Layout::Around around = options_.layout.around(place.level, true);
  const Node end = expressions_.sequence(expressions_.bytes(around.end), expressions_.bytes("]"));
  double size = 0;
  std::map<std::pair<size_t, std::vector<uint64_t>>, Node> made;
  const std::function<Node(size_t, const std::vector<uint64_t>&)> from =
      [&](size_t index, const std::vector<uint64_t>& counts) -> Node {
    const auto known = made.find({index, counts});
    if (known != made.end()) return known->second;
    expressions_.budget().check();
    const bool is_loop = high == kUnbounded && index == last;
    std::vector<Node> ways, again;
    bool may_end = index >= low;
    for (size_t m = 0; m < matches.size(); ++m) may_end = may_end && counts[m] >= matches[m]->low;
    if (may_end) ways.push_back(index == 0 ? expressions_.bytes("]") : end);
    const auto [formula, is_described] = item(found, std::min(index, prefix));
    for (uint32_t chosen = 0; index < last + (is_loop ? 1 : 0) && chosen >> matches.size() == 0;
         ++chosen) {
      std::vector<Formula> parts = {formula};
      std::vector<uint64_t> next = counts;
      bool is_possible = true;
      for (size_t m = 0; m < matches.size(); ++m) {
        const Term& term = *matches[m];
        const bool is_matching = (chosen >> m & 1) != 0;
        const bool is_counted = index >= term.first;
        if (is_matching) {
          is_possible = is_possible && is_counted && counts[m] < most[m];
          ++next[m];
          // If `contains` has only a maximum, the code does not check that a counted item matches.
          // So the count may be too high, but the number of matching items never exceeds the
          // maximum.
          if (term.low > 0) parts.push_back(formulas_.of(*term.schema, term.inner));
        } else if (is_counted && term.high != kNoLimit) {
          parts.push_back(formulas_.of(*term.schema, !term.inner));
        }
      }
      if (!is_possible) continue;
      const Made each = value(formulas_.all(parts), inner, is_described || parts.size() > 1);
      if (each.node == expressions_.nothing()) continue;
      size += each.size;
      const Node part = expressions_.sequence(
          expressions_.bytes(index == 0 ? around.start : around.between), each.node);
      if (is_loop && next == counts) {
        again.push_back(part);
      } else {
        ways.push_back(expressions_.sequence(part, from(is_loop ? index : index + 1, next)));
      }
    }
    Node node = expressions_.either(std::move(ways));
    if (!again.empty())
      node = expressions_.sequence(
          expressions_.repeat(expressions_.either(std::move(again)), 0, kUnbounded), node);
    return made[{index, counts}] = node;
  };
  const Node items = from(0, std::vector<uint64_t>(matches.size(), 0));
  return {expressions_.sequence(expressions_.bytes("["), items), size};
}

// Lists the distinct values for which a formula is true. Adds the text of each value to `keyed`,
// under the key of the value. Adds the keys to `order`. Returns false if the values cannot be
// listed, for example because there are infinitely many.
bool Writer::finite(Formula formula, uint32_t level, std::map<std::string, Node>& keyed,
                    std::vector<std::string>& order) {
  const Term& term = formulas_[formula];
  if (!term.is_typed) return false;
  const auto add = [&](const std::string& key, const std::string& text) {
    if (keyed.emplace(key, expressions_.bytes(text)).second) order.push_back(key);
  };
  if (const ValueSet* const set = formulas_.listed(formula)) {
    for (size_t i = 0; i < set->values.size(); ++i) {
      if (holds_.value(formula, *set->values[i]))
        add(set->keys[i], text_of(*set->values[i], options_.layout, level));
    }
    return true;
  }
  if (term.op == Op::any || term.op == Op::one) {
    const std::vector<Formula> ways = formulas_.alternatives(formula);
    return std::all_of(ways.begin(), ways.end(),
                       [&](Formula way) { return finite(way, level, keyed, order); });
  }
  // The remaining code of this function handles formulas that consist only of a type and, for
  // integers, a minimum and a maximum.
  std::optional<Decimal> low, high;
  bool is_low_excluded = false, is_high_excluded = false;
  for (const Formula part : formulas_.conjuncts(formula)) {
    const Term& each = formulas_[part];
    if (each.op != Op::atom) return false;
    if (each.atom == Atom::type) continue;
    if (each.atom != Atom::bound || !each.number.is_integer()) return false;
    auto& bound = each.high == 0 ? low : high;
    if (bound.has_value()) return false;
    bound = each.number;
    (each.high == 0 ? is_low_excluded : is_high_excluded) = each.low != 0;
  }
  if ((term.kinds & ~(kNull | kBoolean | kInteger)) != 0) return false;
  if ((term.kinds & kInteger) != 0) {
    if (!low.has_value() || !high.has_value()) return false;
    constexpr int64_t kMostDigits = 15;
    const auto first = low->integer(kMostDigits), last = high->integer(kMostDigits);
    if (!first.has_value() || !last.has_value()) return false;
    const int64_t from = *first + (is_low_excluded ? 1 : 0),
                  to = *last - (is_high_excluded ? 1 : 0);
    if (to - from >= static_cast<int64_t>(kMostIntegers)) return false;
    for (int64_t number = from; number <= to; ++number) {
      const std::string text = std::to_string(number);
      add(key_of(Decimal::parse(text)), text);
    }
  }
  if ((term.kinds & kNull) != 0) add("n", "null");
  if ((term.kinds & kBoolean) != 0) add("f", "false"), add("t", "true");
  return true;
}

// Builds the texts of arrays of distinct items from a finite set. Items of a small set may come in
// any order. Items of a large set come in the order of the set. Returns nullopt if the set is not
// finite.
std::optional<Writer::Made> Writer::unique_array(Formula item_, uint64_t low, uint64_t high,
                                                 const Place& place) {
  std::map<std::string, Node> keyed;
  std::vector<std::string> order;
  item_ = entered(item_, place.counts);
  if (!finite(item_, place.level, keyed, order)) return std::nullopt;
  Row made;
  made.low = low;
  made.high = high == kUnbounded ? kNoLimit : high;
  double size = 2;
  for (const std::string& key : order) {
    made.slots.push_back({keyed.at(key), false, key});
    size += static_cast<double>(key.size());
  }
  const uint32_t level = place.level - 1;
  return Made{
      order.size() <= kMostMixed ? row_in_any_order(made, true, level) : row(made, true, level),
      size};
}

}  // namespace dlm::compile::schema
