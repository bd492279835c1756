#include "request.h"

#include <cstring>
#include <string_view>

#include "base/json.h"

namespace dlm::triton {
namespace {

constexpr size_t kMostJsonBytes = 4 << 20;
constexpr size_t kMostMessages = 2048;
constexpr char kInputs[] = "TEXT, MESSAGES, INPUT_IDS";
constexpr char kParameters[] =
    "max_new_tokens, new_tokens, steps, max_steps, preset, effort, schema, regex, grammar, stream, "
    "special_tokens, json_object, stop_strings, enum, deadline_ms, prefix_group";

// A parameter of a request. Triton owns the key and the value.
struct Parameter {
  const char* key = nullptr;
  TRITONSERVER_ParameterType type = TRITONSERVER_PARAMETER_STRING;
  const void* value = nullptr;

  bool is(const char* name) const { return std::strcmp(key, name) == 0; }

  [[noreturn]] void refuse(const char* wanted) const {
    fail(DLM_INVALID_ARGUMENT, "parameter %s: give %s", key, wanted);
  }
  const char* string() const {
    if (type != TRITONSERVER_PARAMETER_STRING) refuse("a string");
    return static_cast<const char*>(value);
  }
  bool flag() const {
    if (type != TRITONSERVER_PARAMETER_BOOL) refuse("true or false");
    return *static_cast<const bool*>(value);
  }
  int64_t integer() const {
    if (type != TRITONSERVER_PARAMETER_INT) refuse("a whole number");
    return *static_cast<const int64_t*>(value);
  }
  int32_t count() const {
    const int64_t number = integer();
    check_range(key, number, 0, (1 << 24) - 1);
    return static_cast<int32_t>(number);
  }
  double number() const {
    if (type == TRITONSERVER_PARAMETER_INT) return static_cast<double>(integer());
    if (type != TRITONSERVER_PARAMETER_DOUBLE) refuse("a number");
    return *static_cast<const double*>(value);
  }
  std::vector<std::string> strings() const {
    std::vector<std::string> found;
    try {
      const auto list = json::parse(string(), kMostJsonBytes);
      for (const json::Value& each : list->elements()) found.push_back(each.string());
    } catch (const Error& error) {
      fail(DLM_INVALID_ARGUMENT, "parameter %s: give a JSON list of strings (%s)", key,
           error.what());
    }
    return found;
  }
};

void* field_of(dlm_policy& policy, const dlm_policy_field& field) {
  return reinterpret_cast<char*>(&policy) + field.offset;
}

// If the parameter has the name of a policy field, sets this field of `asked.policy` and returns
// true. Otherwise returns false.
bool read_policy_field(const Parameter& parameter, Asked& asked) {
  for (size_t index = 0;; ++index) {
    const dlm_policy_field* const field = dlm_policy_field_at(index);
    if (field == nullptr) return false;
    if (!parameter.is(field->name)) continue;
    void* const place = field_of(asked.policy, *field);
    if (field->kind == DLM_FIELD_CHOICE) {
      const std::string_view given = parameter.string();
      std::string known;
      const char* chosen = nullptr;
      for (const char* const* choice = field->choices; *choice != nullptr; ++choice) {
        if (given == *choice) chosen = *choice;
        known += known.empty() ? *choice : std::string(", ") + *choice;
      }
      if (chosen == nullptr)
        fail(DLM_INVALID_ARGUMENT, "policy: %s = %s is not one of: %s", field->name,
             json::quoted(given).c_str(), known.c_str());
      std::memcpy(place, &chosen, sizeof chosen);
    } else {
      const bool is_real = field->kind == DLM_FIELD_DOUBLE;
      const double number = is_real ? parameter.number() : static_cast<double>(parameter.integer());
      if (!(number >= field->lowest && number <= field->highest))
        fail(DLM_INVALID_ARGUMENT, "policy: %s = %.15g is outside %.15g..%.15g", field->name,
             number, field->lowest, field->highest);
      if (is_real) {
        std::memcpy(place, &number, sizeof number);
      } else if (field->kind == DLM_FIELD_INT32) {
        const auto value = static_cast<int32_t>(parameter.integer());
        std::memcpy(place, &value, sizeof value);
      } else {
        const auto value = static_cast<uint64_t>(parameter.integer());
        std::memcpy(place, &value, sizeof value);
      }
    }
    asked.changed.push_back(index);
    return true;
  }
}

void set_constraint(Asked& asked, int32_t kind, std::string content) {
  if (asked.constraint_kind >= 0)
    fail(DLM_INVALID_ARGUMENT,
         "give one of the parameters schema, regex, grammar, enum and json_object");
  asked.constraint_kind = kind;
  asked.constraint = std::move(content);
}

void read_parameter(const Parameter& parameter, Asked& asked) {
  if (parameter.is("max_new_tokens")) {
    asked.max_new_tokens = parameter.count();
  } else if (parameter.is("new_tokens")) {
    asked.new_tokens = parameter.count();
  } else if (parameter.is("steps")) {
    asked.steps = parameter.count();
  } else if (parameter.is("max_steps")) {
    asked.max_steps = parameter.count();
  } else if (parameter.is("prefix_group")) {
    asked.prefix_group = parameter.count();
  } else if (parameter.is("preset")) {
    asked.preset = parameter.string();
  } else if (parameter.is("effort")) {
    asked.effort = parameter.string();
  } else if (parameter.is("deadline_ms")) {
    asked.deadline_ms = parameter.number();
  } else if (parameter.is("stop_strings")) {
    asked.stop_strings = parameter.strings();
  } else if (parameter.is("special_tokens")) {
    asked.has_special_tokens = parameter.flag();
  } else if (parameter.is("stream")) {
    asked.streams = parameter.flag();
  } else if (parameter.is("schema")) {
    set_constraint(asked, DLM_CONSTRAINT_SCHEMA, parameter.string());
  } else if (parameter.is("regex")) {
    set_constraint(asked, DLM_CONSTRAINT_REGEX, parameter.string());
  } else if (parameter.is("grammar")) {
    set_constraint(asked, DLM_CONSTRAINT_GRAMMAR, parameter.string());
  } else if (parameter.is("enum")) {
    parameter.strings();
    set_constraint(asked, DLM_CONSTRAINT_ENUM, parameter.string());
  } else if (parameter.is("json_object")) {
    if (parameter.flag()) set_constraint(asked, DLM_CONSTRAINT_JSON_OBJECT, "");
  } else if (!read_policy_field(parameter, asked)) {
    std::string known = kParameters;
    for (size_t i = 0; dlm_policy_field_at(i) != nullptr; ++i)
      known += std::string(", ") + dlm_policy_field_at(i)->name;
    const std::string message =
        "parameter " + std::string(parameter.key) + " is unknown; known parameters are " + known;
    throw Error(DLM_INVALID_ARGUMENT, message);
  }
}

std::string bytes_of(TRITONBACKEND_Input* input, uint32_t buffer_count) {
  std::string bytes;
  for (uint32_t i = 0; i < buffer_count; ++i) {
    const void* buffer = nullptr;
    uint64_t size = 0;
    TRITONSERVER_MemoryType memory = TRITONSERVER_MEMORY_CPU;
    int64_t memory_id = 0;
    check(TRITONBACKEND_InputBuffer(input, i, &buffer, &size, &memory, &memory_id));
    if (memory == TRITONSERVER_MEMORY_GPU)
      fail(DLM_INVALID_ARGUMENT, "the input is in GPU memory: use host memory");
    bytes.append(static_cast<const char*>(buffer), size);
  }
  return bytes;
}

// Returns the only string of a tensor of strings.
std::string string_of(const char* name, const std::string& bytes) {
  uint32_t size = 0;
  if (bytes.size() < sizeof size) fail(DLM_INVALID_ARGUMENT, "%s: give one string", name);
  std::memcpy(&size, bytes.data(), sizeof size);
  if (bytes.size() - sizeof size != size) fail(DLM_INVALID_ARGUMENT, "%s: give one string", name);
  return bytes.substr(sizeof size);
}

void read_messages(const std::string& text, Asked& asked) {
  try {
    const auto list = json::parse(text, kMostJsonBytes);
    if (list->elements().size() > kMostMessages)
      fail(DLM_INVALID_ARGUMENT, "more than %zu messages", kMostMessages);
    for (const json::Value& each : list->elements()) {
      each.refuse_unknown({"role", "content"});
      asked.messages.emplace_back(each.string("role"), each.string("content"));
    }
  } catch (const Error& error) {
    fail(DLM_INVALID_ARGUMENT, "MESSAGES: give a JSON list of objects with role and content (%s)",
         error.what());
  }
}

void read_input(TRITONBACKEND_Input* input, Asked& asked) {
  const char* name = nullptr;
  TRITONSERVER_DataType type = TRITONSERVER_TYPE_INVALID;
  const int64_t* shape = nullptr;
  uint32_t dims = 0, buffers = 0;
  uint64_t size = 0;
  check(TRITONBACKEND_InputProperties(input, &name, &type, &shape, &dims, &size, &buffers));
  const std::string bytes = bytes_of(input, buffers);
  const std::string_view given = name;
  if (given == "INPUT_IDS") {
    asked.input = Asked::Input::ids;
    asked.ids.resize(bytes.size() / sizeof(int32_t));
    if (!asked.ids.empty())
      std::memcpy(asked.ids.data(), bytes.data(), asked.ids.size() * sizeof(int32_t));
  } else if (given == "MESSAGES") {
    asked.input = Asked::Input::messages;
    read_messages(string_of(name, bytes), asked);
  } else {
    asked.input = Asked::Input::text;
    asked.text = string_of(name, bytes);
  }
}

Outputs read_outputs(TRITONBACKEND_Request* request) {
  uint32_t count = 0;
  check(TRITONBACKEND_RequestOutputCount(request, &count));
  if (count == 0) return {};
  Outputs outputs{false, false, false, false, false, false};
  for (uint32_t i = 0; i < count; ++i) {
    const char* name = nullptr;
    check(TRITONBACKEND_RequestOutputName(request, i, &name));
    const std::string_view wanted = name;
    if (wanted == "TEXT") outputs.text = true;
    if (wanted == "OUTPUT_IDS") outputs.output_ids = true;
    if (wanted == "NFE") outputs.nfe = true;
    if (wanted == "FINISH") outputs.finish = true;
    if (wanted == "PROMPT_TOKENS") outputs.prompt_tokens = true;
    if (wanted == "COMPLETION_TOKENS") outputs.completion_tokens = true;
  }
  return outputs;
}

}  // namespace

Asked read_request(TRITONBACKEND_Request* request) {
  Asked asked;
  dlm_policy_init(&asked.policy, sizeof asked.policy);
  asked.outputs = read_outputs(request);
  uint32_t count = 0;
  check(TRITONBACKEND_RequestInputCount(request, &count));
  if (count != 1) fail(DLM_INVALID_ARGUMENT, "give one of the inputs %s", kInputs);
  TRITONBACKEND_Input* input = nullptr;
  check(TRITONBACKEND_RequestInputByIndex(request, 0, &input));
  read_input(input, asked);
  check(TRITONBACKEND_RequestParameterCount(request, &count));
  for (uint32_t i = 0; i < count; ++i) {
    Parameter parameter;
    check(TRITONBACKEND_RequestParameter(request, i, &parameter.key, &parameter.type,
                                         &parameter.value));
    read_parameter(parameter, asked);
  }
  return asked;
}

void copy_field(size_t index, const dlm_policy& from, dlm_policy& to) {
  const dlm_policy_field* const field = dlm_policy_field_at(index);
  const size_t size = field->kind == DLM_FIELD_INT32    ? sizeof(int32_t)
                      : field->kind == DLM_FIELD_DOUBLE ? sizeof(double)
                      : field->kind == DLM_FIELD_UINT64 ? sizeof(uint64_t)
                                                        : sizeof(const char*);
  std::memcpy(reinterpret_cast<char*>(&to) + field->offset,
              reinterpret_cast<const char*>(&from) + field->offset, size);
}

}  // namespace dlm::triton
