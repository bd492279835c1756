#include "compile/schema/document.h"

#include <algorithm>
#include <cctype>

#include "base/error.h"
#include "compile/json_numbers.h"
#include "compile/json_text.h"
#include "compile/schema/uri.h"

namespace dlm::compile::schema {
namespace {

using json::Value;
using Kind = Value::Kind;

constexpr int kMostNesting = 256;       // of the schema's JSON text
constexpr size_t kMostText = 16 << 20;  // bytes of it
constexpr size_t kBytesPerByte = 100;   // of memory, of its text (base/json.h)
constexpr size_t kMostShown = 60;       // characters of a value in a message
constexpr size_t kShortestWord = 4;     // of a keyword that a misspelled one may mean

// What a keyword's value has to be, which is also where subschemas are.
enum class Shape : uint8_t {
  any,
  boolean,
  text,
  number,
  positive,
  count,
  list,
  names,
  types,
  schema,
  schemas,
  map,
  items,          // a schema, or a list of them before Draft 2020-12
  names_by_name,  // of dependentRequired
  dependencies    // of each name, a schema or names
};

struct Entry {
  const char* name;
  Shape shape;
};

// In the order of Keyword.
constexpr Entry kEntries[] = {
    {"type", Shape::types},
    {"enum", Shape::list},
    {"const", Shape::any},
    {"minimum", Shape::number},
    {"maximum", Shape::number},
    {"exclusiveMinimum", Shape::number},
    {"exclusiveMaximum", Shape::number},
    {"multipleOf", Shape::positive},
    {"minLength", Shape::count},
    {"maxLength", Shape::count},
    {"pattern", Shape::text},
    {"format", Shape::text},
    {"items", Shape::items},
    {"prefixItems", Shape::schemas},
    {"additionalItems", Shape::schema},
    {"minItems", Shape::count},
    {"maxItems", Shape::count},
    {"uniqueItems", Shape::boolean},
    {"contains", Shape::schema},
    {"minContains", Shape::count},
    {"maxContains", Shape::count},
    {"unevaluatedItems", Shape::schema},
    {"properties", Shape::map},
    {"patternProperties", Shape::map},
    {"additionalProperties", Shape::schema},
    {"propertyNames", Shape::schema},
    {"required", Shape::names},
    {"minProperties", Shape::count},
    {"maxProperties", Shape::count},
    {"dependentRequired", Shape::names_by_name},
    {"dependentSchemas", Shape::map},
    {"dependencies", Shape::dependencies},
    {"unevaluatedProperties", Shape::schema},
    {"$ref", Shape::text},
    {"$dynamicRef", Shape::text},
    {"$recursiveRef", Shape::text},
    {"allOf", Shape::schemas},
    {"anyOf", Shape::schemas},
    {"oneOf", Shape::schemas},
    {"not", Shape::schema},
    {"if", Shape::schema},
    {"then", Shape::schema},
    {"else", Shape::schema},
    {"$schema", Shape::text},
    {"$id", Shape::any},
    {"id", Shape::any},
    {"$anchor", Shape::any},
    {"$dynamicAnchor", Shape::any},
    {"$recursiveAnchor", Shape::any},
    {"$defs", Shape::any},
    {"definitions", Shape::any},
};
static_assert(std::size(kEntries) == static_cast<size_t>(Keyword::count));

const std::unordered_map<std::string_view, Keyword>& keywords() {
  static const auto* const made = [] {
    auto* const map = new std::unordered_map<std::string_view, Keyword>;
    for (size_t i = 0; i < std::size(kEntries); ++i)
      map->emplace(kEntries[i].name, static_cast<Keyword>(i));
    return map;
  }();
  return *made;
}

// Annotations of the specification and of OpenAPI, which are no misspelled keywords.
const std::unordered_set<std::string_view>& annotations() {
  static const auto* const made = new std::unordered_set<std::string_view>{"$vocabulary",
                                                                           "$comment",
                                                                           "title",
                                                                           "description",
                                                                           "default",
                                                                           "examples",
                                                                           "deprecated",
                                                                           "readOnly",
                                                                           "writeOnly",
                                                                           "contentEncoding",
                                                                           "contentMediaType",
                                                                           "contentSchema",
                                                                           "example",
                                                                           "nullable",
                                                                           "discriminator",
                                                                           "xml",
                                                                           "externalDocs"};
  return *made;
}

int draft_of(const Value& value, int otherwise, bool* is_named) {
  const Value* const named = value.kind() == Kind::object ? value.find("$schema") : nullptr;
  if (named == nullptr || named->kind() != Kind::string) return otherwise;
  std::string_view uri = named->string();
  while (!uri.empty() && (uri.back() == '#' || uri.back() == '/')) uri.remove_suffix(1);
  const size_t scheme = uri.find("://");
  const std::string_view rest = scheme == std::string_view::npos ? uri : uri.substr(scheme + 3);
  *is_named = true;
  if (rest == "json-schema.org/draft-03/schema")
    fail(DLM_INVALID_ARGUMENT, "schema: $schema %s is not supported: write it for Draft 4 or later",
         json::quoted(named->string()).c_str());
  if (rest == "json-schema.org/draft-04/schema") return kDraft4;
  if (rest == "json-schema.org/draft-06/schema") return kDraft6;
  if (rest == "json-schema.org/draft-07/schema") return kDraft7;
  if (rest == "json-schema.org/draft/2019-09/schema") return kDraft2019;
  if (rest == "json-schema.org/draft/2020-12/schema") return kDraft2020;
  *is_named = false;
  return otherwise;
}

bool is_schema(const Value& value) {
  return value.kind() == Kind::object || value.kind() == Kind::boolean;
}

bool is_list_of_names(const Value& value) {
  return value.kind() == Kind::array &&
         std::all_of(value.elements().begin(), value.elements().end(),
                     [](const Value& each) { return each.kind() == Kind::string; });
}

constexpr std::string_view kTypes[] = {"array",  "boolean", "integer", "null",
                                       "number", "object",  "string"};

bool is_type(const Value& value) {
  return value.kind() == Kind::string &&
         std::find(std::begin(kTypes), std::end(kTypes), value.string()) != std::end(kTypes);
}

// Appends JSON text until it is longer than a message shows.
void append_shown(const Value& value, std::string& out) {
  if (out.size() > 4 * kMostShown) return;
  switch (value.kind()) {
    case Kind::null:
      out += "null";
      return;
    case Kind::boolean:
      out += value.boolean() ? "true" : "false";
      return;
    case Kind::number:
      out += value.written();
      return;
    case Kind::string:
      out += json_string(value.string());
      return;
    case Kind::array:
    case Kind::object: {
      const bool is_array = value.kind() == Kind::array;
      out += is_array ? '[' : '{';
      bool is_first = true;
      for (const Value& item : is_array ? value.elements() : value.members()) {
        if (out.size() > 4 * kMostShown) return;
        if (!is_first) out += ", ";
        is_first = false;
        if (!is_array) out.append(json_string(item.key())).append(": ");
        append_shown(item, out);
      }
      out += is_array ? ']' : '}';
      return;
    }
  }
}

// The first `most` code points of a text, and dots if there are more.
std::string cut(const std::string& text, size_t most) {
  size_t points = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    if ((static_cast<unsigned char>(text[i]) & 0xC0) == 0x80) continue;
    if (points++ == most) return text.substr(0, i) + "...";
  }
  return text;
}

// The Damerau-Levenshtein distance of two words that does not edit a swapped pair again; case
// counts as one edit in all.
size_t distance(std::string_view one, std::string_view other) {
  const auto lower = [](std::string_view text) {
    std::string out(text);
    for (char& c : out) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    return out;
  };
  if (lower(one) == lower(other)) return one == other ? 0 : 1;
  std::vector<size_t> before, last(other.size() + 1), row;
  for (size_t j = 0; j < last.size(); ++j) last[j] = j;
  for (size_t i = 1; i <= one.size(); ++i) {
    row.assign(1, i);
    for (size_t j = 1; j <= other.size(); ++j) {
      size_t cost = std::min(
          {last[j] + 1, row[j - 1] + 1, last[j - 1] + (one[i - 1] != other[j - 1] ? 1 : 0)});
      if (i > 1 && j > 1 && one[i - 1] == other[j - 2] && one[i - 2] == other[j - 1])
        cost = std::min(cost, before[j - 2] + 1);
      row.push_back(cost);
    }
    before.swap(last), last.swap(row);
  }
  return last.back();
}

}  // namespace

std::string shown(const Value& value) {
  std::string out;
  append_shown(value, out);
  return cut(out, kMostShown);
}

std::string_view Document::name(Keyword keyword) {
  return kEntries[static_cast<size_t>(keyword)].name;
}

Document::Document(std::string_view text, Budget& budget) : budget_(budget) {
  budget_.check_memory(text.size() * kBytesPerByte);
  try {
    owned_ = json::parse(text, kMostText, kMostNesting);
  } catch (const Error& error) {
    throw Error(DLM_INVALID_ARGUMENT, std::string("schema: not JSON: ") + error.what());
  }
  root_ = owned_.get();
  read_root();
}

Document::Document(const Value& root, Budget& budget) : budget_(budget), root_(&root) {
  read_root();
}

void Document::read_root() {
  if (!is_schema(*root_))
    throw Error(DLM_INVALID_ARGUMENT,
                "schema: #: " + shown(*root_) + " is not a schema: give an object or a boolean");
  bool is_named = false;
  const int draft = draft_of(*root_, kDraft2020, &is_named);
  resources_.push_back(std::make_unique<Resource>(Resource{root_, "", draft, is_named, {}, {}}));
  by_uri_.emplace("", resources_[0].get());
  index(*root_, nullptr, resources_[0].get(), true);
}

// The resource that an object begins, or the one around it.
Resource* Document::resource_of(const Value& value, Resource* around) {
  bool is_named = around->names_draft;
  const bool is_root = around->root == &value;
  const int draft = is_root ? around->draft : draft_of(value, around->draft, &is_named);
  const Value* id = value.find(draft == kDraft4 ? "id" : "$id");
  if (draft <= kDraft7 && value.find("$ref") != nullptr) id = nullptr;
  Resource* made = around;
  if (id != nullptr && id->kind() == Kind::string) {
    const std::string& given = id->string();
    std::optional<std::string> fragment;
    const std::string uri = resolved(around->uri, given, fragment);
    if (!given.empty() && given[0] == '#') {
      if (draft <= kDraft7 && fragment.has_value()) around->anchors.emplace(*fragment, &value);
    } else if (is_root) {
      around->uri = uri;
      by_uri_.emplace(uri, around);
    } else {
      resources_.push_back(
          std::make_unique<Resource>(Resource{&value, uri, draft, is_named, {}, {}}));
      made = resources_.back().get();
      by_uri_.emplace(uri, made);
    }
    if (draft <= kDraft7 && fragment.has_value() && !fragment->empty() && given[0] != '#')
      made->anchors.emplace(*fragment, &value);
  }
  if (made == around && !is_root && draft != around->draft)
    throw Error(DLM_INVALID_ARGUMENT, "schema: " + place(value) +
                                          ": keyword '$schema' names another draft than the "
                                          "schema around it: give it an $id too");
  for (const char* const keyword : {"$anchor", "$dynamicAnchor"}) {
    const Value* const anchor = value.find(keyword);
    if (anchor == nullptr || anchor->kind() != Kind::string) continue;
    made->anchors.emplace(anchor->string(), &value);
    if (keyword[1] == 'd') made->dynamic_anchors.emplace(anchor->string(), &value);
  }
  return made;
}

void Document::index(const Value& value, const Value* parent, Resource* resource,
                     bool is_schema_here) {
  budget_.check();
  const bool is_object = value.kind() == Kind::object;
  if (!is_object && value.kind() != Kind::array && !is_schema_here) return;
  const auto first = static_cast<uint32_t>(references_.size());
  Place& place = places_.emplace(&value, Place{parent, resource, first, first}).first->second;
  if (!is_object && value.kind() != Kind::array) return;
  if (is_object && is_schema_here) place.resource = resource = resource_of(value, resource);
  bool has_reference = false;
  for (const Value& item : is_object ? value.members() : value.elements()) {
    Shape shape = Shape::any;
    if (is_object && is_schema_here) {
      const auto found = keywords().find(item.key());
      if (found != keywords().end()) {
        const Keyword keyword = found->second;
        shape = keyword == Keyword::defs || keyword == Keyword::definitions
                    ? Shape::map
                    : kEntries[static_cast<size_t>(keyword)].shape;
      }
    }
    if (is_object && !has_reference && item.kind() == Kind::string &&
        (item.key() == "$ref" || item.key() == "$dynamicRef" || item.key() == "$recursiveRef")) {
      references_.push_back(&value);
      has_reference = true;
    }
    const bool is_map =
        (shape == Shape::map || shape == Shape::dependencies) && item.kind() == Kind::object;
    const bool is_list =
        (shape == Shape::schemas || shape == Shape::items) && item.kind() == Kind::array;
    if (is_map || is_list) {
      const auto before = static_cast<uint32_t>(references_.size());
      places_.emplace(&item, Place{&value, resource, before, before});
      for (const Value& each : is_map ? item.members() : item.elements())
        index(each, &item, resource, is_schema(each) || shape != Shape::dependencies);
      places_.at(&item).last = static_cast<uint32_t>(references_.size());
    } else {
      index(item, &value, resource, shape == Shape::schema || shape == Shape::items);
    }
  }
  places_.at(&value).last = static_cast<uint32_t>(references_.size());
}

const std::vector<const Value*>& Document::destinations(const Value& holder) {
  const auto [at, is_new] = destinations_.try_emplace(&holder);
  if (!is_new) return at->second;
  Schema from{&holder, places_.at(&holder).resource, {}, {}};
  for (const Keyword keyword : {Keyword::ref, Keyword::dynamic_ref, Keyword::recursive_ref}) {
    const Value* const reference = holder.find(name(keyword));
    if (reference == nullptr || reference->kind() != Kind::string) continue;
    from.keywords[static_cast<size_t>(keyword)] = reference;
    try {
      at->second.push_back(&target_value(from, keyword));
    } catch (const Error&) {
      // It is an error only where the schema is used.
    }
  }
  return at->second;
}

std::vector<const Value*> Document::destinations_below(const Value& value) {
  std::vector<const Value*> found;
  const auto place = places_.find(&value);
  if (place == places_.end()) return found;
  for (uint32_t i = place->second.first; i < place->second.last; ++i) {
    budget_.check();
    const std::vector<const Value*>& some = destinations(*references_[i]);
    found.insert(found.end(), some.begin(), some.end());
  }
  return found;
}

std::string Document::place(const Value& value) const {
  std::string out;
  const Value* at = &value;
  for (auto found = places_.find(at); found != places_.end(); found = places_.find(at)) {
    const Value* const parent = found->second.parent;
    if (parent == nullptr) break;
    std::string step = "/";
    if (parent->kind() == Kind::array) {
      step += std::to_string(at - parent->elements().data());
    } else {
      for (const char c : at->key()) step += c == '~' ? "~0" : c == '/' ? "~1" : std::string(1, c);
    }
    out.insert(0, cut(step, kMostShown));
    if (out.size() > 200) return "#/..." + out.substr(out.find('/', out.size() - 160));
    at = parent;
  }
  return "#" + out;
}

void Document::refuse(const Schema& at, Keyword keyword, const std::string& why) const {
  throw Error(DLM_INVALID_ARGUMENT, "schema: " + place(*at.value) + ": keyword '" +
                                        std::string(name(keyword)) + "' " + why);
}

void Document::warn(const std::string& text) {
  constexpr size_t kMostWarnings = 100;
  if (warnings_.size() < kMostWarnings && warned_.insert(text).second) warnings_.push_back(text);
}

const Schema& Document::schema(const Value& value) {
  std::unique_ptr<Schema>& made = schemas_[&value];
  if (made == nullptr) {
    budget_.check();
    if (!is_schema(value))
      throw Error(DLM_INVALID_ARGUMENT, "schema: " + place(value) + ": " + shown(value) +
                                            " is not a schema: give an object or a boolean");
    const auto found = places_.find(&value);
    const Resource* const resource =
        found == places_.end() ? resources_[0].get() : found->second.resource;
    auto read = std::make_unique<Schema>();
    read->value = &value;
    read->resource = resource;
    if (value.kind() == Kind::object) read_keywords(*read);
    made = std::move(read);
  }
  return *made;
}

void Document::read_keywords(Schema& schema) {
  for (const Value& member : schema.value->members()) {
    budget_.check();
    const auto found = keywords().find(member.key());
    if (found == keywords().end()) {
      warn_of_misspelled(schema, member.key());
      continue;
    }
    check_shape(schema, found->second, member);
    schema.keywords[static_cast<size_t>(found->second)] = &member;
  }
  if (const Value* const properties = schema[Keyword::properties]) {
    for (const Value& each : properties->members()) schema.properties.emplace(each.key(), &each);
  }
  if (schema[Keyword::prefix_items] != nullptr && schema.draft() < kDraft2020)
    refuse(schema, Keyword::prefix_items,
           "does not exist in the draft that $schema names: items is what it has");
}

void Document::check_shape(const Schema& schema, Keyword keyword, const Value& value) const {
  bool is_right = true;
  const char* expected = "";
  const auto count = [&] {
    if (value.kind() != Kind::number) return false;
    const Decimal number = Decimal::parse(value.written());
    return !number.is_negative && number.is_integer();
  };
  const Shape shape = kEntries[static_cast<size_t>(keyword)].shape;
  // Draft 4 and documents that name no draft.
  const bool may_be_older = !schema.resource->names_draft;
  switch (shape) {
    case Shape::any:
      break;
    case Shape::boolean:
      is_right = value.kind() == Kind::boolean, expected = "true or false";
      break;
    case Shape::text:
      is_right = value.kind() == Kind::string, expected = "a string";
      break;
    case Shape::number:
      expected = "a number";
      is_right = value.kind() == Kind::number ||
                 (value.kind() == Kind::boolean && (may_be_older || schema.draft() == kDraft4) &&
                  (keyword == Keyword::exclusive_minimum || keyword == Keyword::exclusive_maximum));
      break;
    case Shape::positive:
      expected = "a number above 0";
      is_right = value.kind() == Kind::number;
      if (is_right) {
        const Decimal number = Decimal::parse(value.written());
        is_right = !number.is_negative && !number.is_zero();
      }
      break;
    case Shape::count:
      is_right = count(), expected = "a count";
      break;
    case Shape::list:
      is_right = value.kind() == Kind::array, expected = "a list of values";
      break;
    case Shape::names:
      is_right = is_list_of_names(value), expected = "a list of names";
      break;
    case Shape::types:
      expected =
          "a type, or a list of types: array, boolean, integer, null, number, object, string";
      is_right = value.kind() == Kind::array
                     ? !value.elements().empty() &&
                           std::all_of(value.elements().begin(), value.elements().end(), is_type)
                     : is_type(value);
      break;
    case Shape::schema:
      is_right = is_schema(value), expected = "a schema: an object or a boolean";
      break;
    case Shape::schemas:
      is_right = value.kind() == Kind::array && !value.elements().empty();
      expected = "a list of schemas";
      break;
    case Shape::map:
      is_right = value.kind() == Kind::object, expected = "an object of schemas";
      break;
    case Shape::items:
      expected = "a schema: an object or a boolean";
      is_right = is_schema(value) ||
                 (value.kind() == Kind::array && (may_be_older || schema.draft() < kDraft2020));
      break;
    case Shape::names_by_name:
      expected = "an object of lists of names";
      is_right = value.kind() == Kind::object &&
                 std::all_of(value.members().begin(), value.members().end(), is_list_of_names);
      break;
    case Shape::dependencies:
      expected = "an object of schemas and lists of names";
      is_right = value.kind() == Kind::object &&
                 std::all_of(value.members().begin(), value.members().end(), [](const Value& each) {
                   return is_schema(each) || is_list_of_names(each);
                 });
      break;
  }
  if (!is_right)
    throw Error(DLM_INVALID_ARGUMENT, "schema: " + place(*schema.value) + "/" +
                                          std::string(name(keyword)) + ": " + shown(value) +
                                          " is not " + expected);
}

void Document::warn_of_misspelled(const Schema& schema, const std::string& keyword) {
  constexpr size_t kLongest = 24;
  if (annotations().count(keyword) != 0 || keyword.empty() || keyword.size() > kLongest) return;
  if (!std::isalpha(static_cast<unsigned char>(keyword[0])) || keyword.substr(0, 2) == "x-") return;
  size_t best = kLongest;
  const char* meant = "";
  for (const Entry& entry : kEntries) {
    const std::string_view known = entry.name;
    if (known.size() < kShortestWord || entry.shape == Shape::any) continue;
    const size_t found = distance(keyword, known);
    if (found < best || (found == best && known < meant)) best = found, meant = entry.name;
  }
  if (best <= (keyword.size() < 6 ? 1u : 2u))
    warn("schema: " + place(*schema.value) + ": keyword '" + keyword +
         "' is not known and is ignored: did you mean '" + meant + "'?");
}

const Value* Document::at_pointer(const Resource& resource, std::string_view pointer) const {
  const auto steps = pointer_steps(pointer);
  if (!steps.has_value()) return nullptr;
  const Value* at = resource.root;
  for (const std::string& step : *steps) {
    budget_.check();
    if (at->kind() == Kind::object) {
      at = at->find(step);
    } else if (at->kind() == Kind::array) {
      if (step.empty() || step.size() > 9 || (step[0] == '0' && step.size() > 1) ||
          !std::all_of(step.begin(), step.end(), [](char c) { return c >= '0' && c <= '9'; }))
        return nullptr;
      const size_t number = std::stoul(step);
      at = number < at->elements().size() ? &at->elements()[number] : nullptr;
    } else {
      return nullptr;
    }
    if (at == nullptr) return nullptr;
  }
  return at;
}

const Schema& Document::target(const Schema& from, Keyword keyword) {
  const Value& found = target_value(from, keyword);
  if (!is_schema(found))
    throw Error(DLM_INVALID_ARGUMENT, "schema: " + place(*from.value) + ": " +
                                          std::string(name(keyword)) + " " + shown(*from[keyword]) +
                                          " leads to something that is not a schema");
  return schema(found);
}

const Value& Document::target_value(const Schema& from, Keyword keyword) {
  const Value& reference = *from[keyword];
  const auto refuse_it = [&](const char* why) {
    throw Error(DLM_INVALID_ARGUMENT, "schema: " + place(*from.value) + ": " +
                                          std::string(name(keyword)) + " " + shown(reference) +
                                          " " + why);
  };
  std::optional<std::string> fragment;
  const std::string uri = resolved(from.resource->uri, reference.string(), fragment);
  const auto resource = by_uri_.find(uri);
  if (resource == by_uri_.end())
    refuse_it(
        "is not in this schema, and other documents are never retrieved: copy what it names into "
        "$defs");
  const Value* found = nullptr;
  const bool is_pointer = fragment.has_value() && (fragment->empty() || (*fragment)[0] == '/');
  if (is_pointer) {
    found = at_pointer(*resource->second, *fragment);
  } else if (fragment.has_value()) {
    const auto anchor = resource->second->anchors.find(*fragment);
    if (anchor != resource->second->anchors.end()) found = anchor->second;
  }
  if (found == nullptr) refuse_it("leads nowhere");
  if (keyword == Keyword::ref) return *found;

  // The outermost schema of the dynamic scope with the same anchor is what counts. The root is
  // always the outermost.
  std::vector<const Value*> same;
  if (keyword == Keyword::dynamic_ref) {
    const auto anchor = is_pointer ? resource->second->dynamic_anchors.end()
                                   : resource->second->dynamic_anchors.find(*fragment);
    if (anchor == resource->second->dynamic_anchors.end() || anchor->second != found) return *found;
    for (const auto& each : resources_) {
      const auto other = each->dynamic_anchors.find(*fragment);
      if (other == each->dynamic_anchors.end()) continue;
      if (each == resources_[0]) return *other->second;
      same.push_back(other->second);
    }
  } else {
    const auto is_anchor = [](const Value& value) {
      const Value* const anchor =
          value.kind() == Kind::object ? value.find("$recursiveAnchor") : nullptr;
      return anchor != nullptr && anchor->kind() == Kind::boolean && anchor->boolean();
    };
    if (!is_anchor(*found)) return *found;
    if (is_anchor(*root_)) return *root_;
    for (const auto& each : resources_)
      if (is_anchor(*each->root)) same.push_back(each->root);
  }
  if (same.size() > 1)
    refuse(from, keyword,
           "leads to different schemas, as it depends on how it is reached: name one with $ref");
  return *found;
}

}  // namespace dlm::compile::schema
