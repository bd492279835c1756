// The C ABI of constraints.
#include <memory>

#include "api/handles.h"

using dlm::guarded, dlm::require;

dlm_status dlm_automaton_open(const char* path, char* message, size_t message_capacity,
                              dlm_automaton** automaton) {
  if (automaton != nullptr) *automaton = nullptr;
  return guarded(message, message_capacity, [&] {
    require(automaton, "automaton");
    require(path, "path");
    *automaton = new dlm_automaton{std::make_shared<dlm::Automaton>(dlm::open_automaton(path))};
  });
}

dlm_status dlm_automaton_read(const void* data, size_t size, char* message, size_t message_capacity,
                              dlm_automaton** automaton) {
  if (automaton != nullptr) *automaton = nullptr;
  return guarded(message, message_capacity, [&] {
    require(automaton, "automaton");
    require(data, "data");
    *automaton = new dlm_automaton{
        std::make_shared<dlm::Automaton>(dlm::read_automaton(data, size, "the constraint"))};
  });
}

void dlm_automaton_destroy(dlm_automaton* automaton) { delete automaton; }

int32_t dlm_automaton_shortest(const dlm_automaton* automaton) {
  return automaton == nullptr ? 0 : automaton->automaton->distances.front();
}
