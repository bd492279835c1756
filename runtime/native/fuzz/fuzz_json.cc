// A fuzz target that parses any text as JSON. Parsing must either fail with an error message that
// contains a line number, or return a tree. All accessors of the tree must return or throw. When
// the target writes the tree, parses the written text and writes it again, both written texts must
// be equal.
#include "base/error.h"
#include "base/json.h"
#include "base/utf8.h"
#include "fuzz.h"

namespace {

template <class Ask>
void ask(Ask ask) {
  try {
    ask();
  } catch (const dlm::Error& error) {
    CLAIM(error.status() == DLM_BAD_BUNDLE && fuzz::is_sentence(error.what()));
  }
}

void walk(const dlm::json::Value& value) {
  CLAIM(!value.path().empty() && value.path().size() < 1000);
  CLAIM(dlm::is_utf8(value.key()));
  using Kind = dlm::json::Value::Kind;
  // Calls only some accessors for each kind, because throwing errors is slow.
  switch (value.kind()) {
    case Kind::null:
      ask([&] { value.refuse("it is refused"); });
      break;
    case Kind::boolean:
      value.boolean(), ask([&] { value.string(); });
      break;
    case Kind::number:
      ask([&] { value.number(-1, 1e300); });
      ask([&] { value.integer(INT64_MIN, INT64_MAX); });
      break;
    case Kind::string:
      CLAIM(dlm::is_utf8(value.string())), ask([&] { value.members(); });
      break;
    case Kind::array: {
      for (const auto& each : value.elements()) walk(each);
      ask([&] { value.number(-1, 1); });
      break;
    }
    case Kind::object: {
      ask([&] { value.at("loop"); });
      ask([&] { value.refuse_unknown({"a", "loop"}); });
      for (const auto& each : value.members()) CLAIM(value.find(each.key()) == &each), walk(each);
    }
  }
}

}  // namespace

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  ask([&] {
    const auto root = dlm::json::parse({reinterpret_cast<const char*>(data), size}, 1 << 14);
    walk(*root);
    const std::string text = root->canonical();
    CLAIM(dlm::json::parse(text, SIZE_MAX)->canonical() == text);
  });
  return 0;
}
