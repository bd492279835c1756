// These helpers convert errors of ONNX Runtime's C API to exceptions, and own objects of the API.
#pragma once

#include <string>
#include <string_view>

#include "base/error.h"
#include "base/one_line.h"
#include "engines/onnxruntime/ort_api.h"

namespace dlm {

// If `reported` is an error of ONNX Runtime, throws an Error with the given status. The message
// consists of `context` and ONNX Runtime's message.
inline void check(const ort::Api& api, OrtStatus* reported, std::string_view context,
                  dlm_status status = DLM_ENGINE_FAILED) {
  if (reported == nullptr) return;
  const std::string message = one_line(api.call<ort::GetErrorMessage>(reported));
  api.call<ort::ReleaseStatus>(reported);
  throw Error(status, std::string(context) + ": " + message);
}

// Calls a function of the API. If the function returns an error, throws the error.
template <class Entry, class... Arguments>
void ask(const ort::Api& api, Arguments... arguments) {
  check(api, api.call<Entry>(arguments...), "ONNX Runtime");
}

// Owns an object of the API. Release is the function that frees the object.
template <class Object, class Release>
class Owned {
 public:
  explicit Owned(const ort::Api& api) : api_(api) {}
  ~Owned() {
    if (object_ != nullptr) api_.call<Release>(object_);
  }
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  Object* get() const { return object_; }
  Object** out() { return &object_; }

 private:
  const ort::Api api_;
  Object* object_ = nullptr;
};

}  // namespace dlm
