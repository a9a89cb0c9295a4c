#include "host_faults.h"

#include <csetjmp>
#include <csignal>

namespace ptx_emulator {

namespace {

thread_local sigjmp_buf fault_jump;
thread_local volatile sig_atomic_t fault_armed = 0;
thread_local void* volatile fault_address = nullptr;
struct sigaction previous_segv, previous_bus;

void on_fault(int signal, siginfo_t* information, void* context) {
    if (fault_armed) {
        fault_armed = 0;
        fault_address = information->si_addr;
        siglongjmp(fault_jump, 1);
    }
    const struct sigaction& previous = signal == SIGSEGV ? previous_segv : previous_bus;
    if (previous.sa_flags & SA_SIGINFO) {
        previous.sa_sigaction(signal, information, context);
    } else if (previous.sa_handler != SIG_DFL && previous.sa_handler != SIG_IGN) {
        previous.sa_handler(signal);
    } else {
        std::signal(signal, SIG_DFL);
        std::raise(signal);
    }
}

class FaultGuard {
  public:
    FaultGuard() {
        struct sigaction action = {};
        action.sa_sigaction = on_fault;
        action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
        sigaction(SIGSEGV, &action, &previous_segv);
        sigaction(SIGBUS, &action, &previous_bus);
    }
    ~FaultGuard() {
        fault_armed = 0;
        sigaction(SIGSEGV, &previous_segv, nullptr);
        sigaction(SIGBUS, &previous_bus, nullptr);
    }
};

}  // namespace

bool survives_faults(const std::function<void()>& f, void** address) {
    const FaultGuard faults;
    if (sigsetjmp(fault_jump, 1) == 0) {
        fault_armed = 1;
        f();
        fault_armed = 0;
        return true;
    }
    *address = fault_address;
    return false;
}

}  // namespace ptx_emulator
