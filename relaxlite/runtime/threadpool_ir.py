"""LLVM IR of the thread pool, which `threadpool.py` documents, links and starts."""

from __future__ import annotations

import sys
from string import Template
from typing import Literal

WaitKind = Literal["futex", "condvar", "wait_on_address"]
"""Wait primitive: Linux futex, POSIX condition variable, or Windows WaitOnAddress."""

KERNEL_SYMBOLS = ("relaxlite_parallel_for", "relaxlite_num_threads", "relaxlite_hold_workers")
CONTROL_SYMBOLS = ("pool_worker", "pool_reset", "pool_configure", "pool_spin")

_POOL_IR = Template("""
; Each variable that threads fight over has its own pair of cache lines (adjacent lines are prefetched together).
@state    = internal global [16 x i64] zeroinitializer, align 128      ; epoch << 32 | closed | waiting | active
@next     = internal global [16 x i64] zeroinitializer, align 128      ; the next chunk to take
@job      = internal global [16 x i64] zeroinitializer, align 128      ; a %Job
@busy     = internal global [32 x i32] zeroinitializer, align 128      ; the callers' lock
@sleepers = internal global [32 x i32] zeroinitializer, align 128      ; workers asleep on the epoch, or about to be
@control  = internal global [16 x i64] zeroinitializer, align 128      ; a %Control, rarely written

%Job     = type { ptr, ptr, i64, i32 }                                 ; fn, ctx, number of chunks, status
%Control = type { i32, i32, i64, i64 }                                 ; thread limit, holds, spins, spins while held

define i32 @relaxlite_parallel_for(ptr %fn, ptr %ctx, i64 %count) {
entry:
  %limit = load atomic i32, ptr @control monotonic, align 8
  %has_helpers = icmp sgt i32 %limit, 1
  %has_work = icmp sgt i64 %count, 1
  %wants_pool = and i1 %has_helpers, %has_work
  br i1 %wants_pool, label %lock, label %serial
lock:
  %taken = atomicrmw xchg ptr @busy, i32 1 acquire
  %is_free = icmp eq i32 %taken, 0
  br i1 %is_free, label %publish, label %serial
serial:
  %serial_status = call i32 @run_serially(ptr %fn, ptr %ctx, i64 %count)
  ret i32 %serial_status
publish:
  store ptr %fn, ptr @job
  store ptr %ctx, ptr getelementptr (%Job, ptr @job, i32 0, i32 1)
  store i64 %count, ptr getelementptr (%Job, ptr @job, i32 0, i32 2)
  store i32 0, ptr getelementptr (%Job, ptr @job, i32 0, i32 3)
  store atomic i64 0, ptr @next monotonic, align 8
  %closed = load atomic i64, ptr @state monotonic, align 8
  %epoch = and i64 %closed, $epoch_mask
  %open = add i64 %epoch, $epoch_step
  store atomic i64 %open, ptr @state seq_cst, align 8
  call void @wake_sleepers(i32 %limit, i64 %count)
  call void @run_chunks()
  call void @join_workers()
  %status = load atomic i32, ptr getelementptr (%Job, ptr @job, i32 0, i32 3) monotonic, align 8
  store atomic i32 0, ptr @busy release, align 4
  ret i32 %status
}

define i64 @relaxlite_num_threads() {
  %limit = load atomic i32, ptr @control monotonic, align 8
  %threads = zext i32 %limit to i64
  ret i64 %threads
}

define void @relaxlite_hold_workers(i32 %delta) {
  %before = atomicrmw add ptr getelementptr (%Control, ptr @control, i32 0, i32 1), i32 %delta monotonic
  ret void
}

define internal i32 @run_serially(ptr %fn, ptr %ctx, i64 %count) {
entry:
  br label %test
test:
  %chunk = phi i64 [ 0, %entry ], [ %following, %run ]
  %status = phi i32 [ 0, %entry ], [ %status_after, %run ]
  %is_chunk = icmp slt i64 %chunk, %count
  br i1 %is_chunk, label %run, label %done
run:
  %result = call i32 %fn(ptr %ctx, i64 %chunk)
  %is_good = icmp eq i32 %status, 0
  %status_after = select i1 %is_good, i32 %result, i32 %status
  %following = add i64 %chunk, 1
  br label %test
done:
  ret i32 %status
}

define internal void @run_chunks() {
entry:
  %fn = load ptr, ptr @job
  %ctx = load ptr, ptr getelementptr (%Job, ptr @job, i32 0, i32 1)
  %count = load i64, ptr getelementptr (%Job, ptr @job, i32 0, i32 2)
  br label %take
take:
  %chunk = atomicrmw add ptr @next, i64 1 monotonic
  %is_chunk = icmp slt i64 %chunk, %count
  br i1 %is_chunk, label %run, label %done
run:
  %status = call i32 %fn(ptr %ctx, i64 %chunk)
  %is_good = icmp eq i32 %status, 0
  br i1 %is_good, label %take, label %fail
fail:
  %first = cmpxchg ptr getelementptr (%Job, ptr @job, i32 0, i32 3), i32 0, i32 %status monotonic monotonic
  br label %take
done:
  ret void
}

; Wake as many as can help: with fewer chunks than threads, those awake already may be enough.
define internal void @wake_sleepers(i32 %limit, i64 %count) {
entry:
  %sleeping = load atomic i32, ptr @sleepers seq_cst, align 4
  %limit_wide = sext i32 %limit to i64
  %surplus = sub i64 %limit_wide, %count
  %has_surplus = icmp sgt i64 %surplus, 0
  %spared_wide = select i1 %has_surplus, i64 %surplus, i64 0
  %spared = trunc i64 %spared_wide to i32
  %wanted = sub i32 %sleeping, %spared
  %wakes = icmp sgt i32 %wanted, 0
  br i1 %wakes, label %wake, label %done
wake:
  call void @wake(ptr getelementptr (i8, ptr @state, i64 $epoch_offset), i32 %wanted)
  br label %done
done:
  ret void
}

; Close the epoch, then wait until the workers that joined it have left: spin first, then sleep.
define internal void @join_workers() {
entry:
  %spins = load atomic i64, ptr getelementptr (%Control, ptr @control, i32 0, i32 2) monotonic, align 8
  %before = atomicrmw or ptr @state, i64 $closed acq_rel
  br label %test
test:
  %state = phi i64 [ %before, %entry ], [ %reloaded, %spin ]
  %round = phi i64 [ 0, %entry ], [ %following, %spin ]
  %active = and i64 %state, $active_mask
  %is_done = icmp eq i64 %active, 0
  br i1 %is_done, label %done, label %more
more:
  %spins_on = icmp slt i64 %round, %spins
  br i1 %spins_on, label %spin, label %sleep
spin:
  call void @spin_once(i64 %round)
  %following = add i64 %round, 1
  %reloaded = load atomic i64, ptr @state acquire, align 8
  br label %test
sleep:
  %announced = atomicrmw or ptr @state, i64 $waiting acq_rel
  %still_active = and i64 %announced, $active_mask
  %is_over = icmp eq i64 %still_active, 0
  br i1 %is_over, label %done, label %block
block:
  %with_flag = or i64 %announced, $waiting
  %expected = trunc i64 %with_flag to i32
  call void @block_while(ptr getelementptr (i8, ptr @state, i64 $active_offset), i32 %expected)
  br label %sleep
done:
  ret void
}

; The life of a worker. %number counts from 1: number 0 is whoever calls relaxlite_parallel_for.
define void @pool_worker(i32 %number) {
entry:
  %first_state = load atomic i64, ptr @state acquire, align 8
  %first_epoch = call i32 @epoch_of(i64 %first_state)
  %none_seen = sub i32 %first_epoch, 1
  br label %idle
idle:
  %seen = phi i32 [ %none_seen, %entry ], [ %seen, %idle ], [ %epoch, %park ], [ %epoch, %join ], [ %seen, %claim ],
                  [ %epoch, %work ]
  %state = call i64 @await_epoch(i32 %seen)
  %epoch = call i32 @epoch_of(i64 %state)
  %is_old = icmp eq i32 %epoch, %seen
  br i1 %is_old, label %idle, label %check
check:
  %limit = load atomic i32, ptr @control monotonic, align 8
  %is_allowed = icmp slt i32 %number, %limit
  br i1 %is_allowed, label %join, label %park
park:
  call void @block_while(ptr @control, i32 %limit)
  br label %idle
join:
  %closed_bit = and i64 %state, $closed
  %is_open = icmp eq i64 %closed_bit, 0
  br i1 %is_open, label %claim, label %idle
claim:
  %joined = add i64 %state, 1
  %swap = cmpxchg ptr @state, i64 %state, i64 %joined acquire monotonic
  %is_in = extractvalue { i64, i1 } %swap, 1
  br i1 %is_in, label %work, label %idle
work:
  call void @run_chunks()
  call void @leave()
  br label %idle
}

define internal void @leave() {
entry:
  %before = atomicrmw sub ptr @state, i64 1 acq_rel
  %low = and i64 %before, $low_mask
  %is_awaited = icmp eq i64 %low, $last_awaited
  br i1 %is_awaited, label %wake, label %done
wake:
  call void @wake(ptr getelementptr (i8, ptr @state, i64 $active_offset), i32 1)
  br label %done
done:
  ret void
}

; The state once its epoch is no longer %seen; may also return early, with the epoch unchanged.
define internal i64 @await_epoch(i32 %seen) {
entry:
  br label %test
test:
  %round = phi i64 [ 0, %entry ], [ %following, %spin ]
  %state = load atomic i64, ptr @state acquire, align 8
  %epoch = call i32 @epoch_of(i64 %state)
  %is_same = icmp eq i32 %epoch, %seen
  br i1 %is_same, label %spin, label %fresh
fresh:
  ret i64 %state
spin:
  call void @spin_once(i64 %round)
  %following = add i64 %round, 1
  %holds = load atomic i32, ptr getelementptr (%Control, ptr @control, i32 0, i32 1) monotonic, align 4
  %idle_spins = load atomic i64, ptr getelementptr (%Control, ptr @control, i32 0, i32 2) monotonic, align 8
  %held_spins = load atomic i64, ptr getelementptr (%Control, ptr @control, i32 0, i32 3) monotonic, align 8
  %is_held = icmp sgt i32 %holds, 0
  %budget = select i1 %is_held, i64 %held_spins, i64 %idle_spins
  %spins_on = icmp slt i64 %following, %budget
  br i1 %spins_on, label %test, label %announce
announce:
  ; Either the caller that opens an epoch after this line sees the sleeper, or the load below sees that epoch.
  %sleepers_before = atomicrmw add ptr @sleepers, i32 1 seq_cst
  %last_state = load atomic i64, ptr @state seq_cst, align 8
  %last_epoch = call i32 @epoch_of(i64 %last_state)
  %sleeps = icmp eq i32 %last_epoch, %seen
  br i1 %sleeps, label %sleep, label %awake
sleep:
  call void @block_while(ptr getelementptr (i8, ptr @state, i64 $epoch_offset), i32 %seen)
  br label %awake
awake:
  %sleepers_after = atomicrmw sub ptr @sleepers, i32 1 seq_cst
  %new_state = load atomic i64, ptr @state acquire, align 8
  ret i64 %new_state
}

; For a fresh pool, and for a forked child, where the workers and the other callers are gone.
define void @pool_reset() {
  %state = load i64, ptr @state
  %epoch = and i64 %state, $epoch_mask
  %closed = or i64 %epoch, $closed
  store i64 %closed, ptr @state
  store i32 0, ptr @busy
  store i32 0, ptr @sleepers
  store i32 1, ptr @control
  store i32 0, ptr getelementptr (%Control, ptr @control, i32 0, i32 1)
  call void @reset_waiting()
  fence seq_cst
  ret void
}

; Workers whose number is not below the limit sleep on it.
define void @pool_configure(i32 %limit, i64 %spins, i64 %held_spins) {
  store atomic i64 %spins, ptr getelementptr (%Control, ptr @control, i32 0, i32 2) monotonic, align 8
  store atomic i64 %held_spins, ptr getelementptr (%Control, ptr @control, i32 0, i32 3) monotonic, align 8
  store atomic i32 %limit, ptr @control seq_cst, align 8
  call void @wake(ptr @control, i32 2147483647)
  ret void
}

; What one round of spinning costs, for calibration.
define void @pool_spin(i64 %count) {
entry:
  br label %spin
spin:
  %round = phi i64 [ 0, %entry ], [ %following, %spin ]
  call void @spin_once(i64 0)
  %state = load atomic i64, ptr @state acquire, align 8
  %following = add i64 %round, 1
  %spins_on = icmp slt i64 %following, %count
  br i1 %spins_on, label %spin, label %done
done:
  ret void
}

define internal void @spin_once(i64 %round) alwaysinline {
entry:
  $relax
  %phase = and i64 %round, 63
  %is_last = icmp eq i64 %phase, 63
  br i1 %is_last, label %offer, label %done
offer:
  %yielded = call i32 @$yield_core()
  br label %done
done:
  ret void
}

define internal i32 @epoch_of(i64 %state) alwaysinline {
  %high = lshr i64 %state, 32
  %epoch = trunc i64 %high to i32
  ret i32 %epoch
}
declare i32 @$yield_core()
$relax_declaration
""")

# Each of the three defines block_while(address, value), which sleeps while the word there equals the value, and may
# return early; wake(address, count), which wakes at least `count` sleepers; reset_waiting(), which forgets sleepers.
_WAIT_IR: dict[WaitKind, Template] = {
    "futex": Template("""
declare i64 @syscall(i64, ...)

define internal void @block_while(ptr %address, i32 %value) {
  %wide = zext i32 %value to i64
  %result = call i64 (i64, ...) @syscall(i64 $futex, ptr %address, i64 128, i64 %wide, ptr null) ; FUTEX_WAIT_PRIVATE
  ret void
}

define internal void @wake(ptr %address, i32 %count) {
  %wide = zext i32 %count to i64
  %result = call i64 (i64, ...) @syscall(i64 $futex, ptr %address, i64 129, i64 %wide)           ; FUTEX_WAKE_PRIVATE
  ret void
}

define internal void @reset_waiting() {
  ret void
}
"""),
    "condvar": Template("""
@mutex     = internal global [16 x i64] zeroinitializer, align 128    ; larger than any pthread_mutex_t
@condition = internal global [16 x i64] zeroinitializer, align 128    ; and pthread_cond_t

declare i32 @pthread_mutex_init(ptr, ptr)
declare i32 @pthread_cond_init(ptr, ptr)
declare i32 @pthread_mutex_lock(ptr)
declare i32 @pthread_mutex_unlock(ptr)
declare i32 @pthread_cond_wait(ptr, ptr)
declare i32 @pthread_cond_broadcast(ptr)

define internal void @block_while(ptr %address, i32 %value) {
entry:
  %locked = call i32 @pthread_mutex_lock(ptr @mutex)
  %current = load atomic i32, ptr %address seq_cst, align 4
  %sleeps = icmp eq i32 %current, %value
  br i1 %sleeps, label %sleep, label %done
sleep:
  %woken = call i32 @pthread_cond_wait(ptr @condition, ptr @mutex)
  br label %done
done:
  %unlocked = call i32 @pthread_mutex_unlock(ptr @mutex)
  ret void
}

define internal void @wake(ptr %address, i32 %count) {
  %locked = call i32 @pthread_mutex_lock(ptr @mutex)
  %woken = call i32 @pthread_cond_broadcast(ptr @condition)
  %unlocked = call i32 @pthread_mutex_unlock(ptr @mutex)
  ret void
}

define internal void @reset_waiting() {
  %mutex = call i32 @pthread_mutex_init(ptr @mutex, ptr null)
  %condition = call i32 @pthread_cond_init(ptr @condition, ptr null)
  ret void
}
"""),
    "wait_on_address": Template("""
declare i32 @WaitOnAddress(ptr, ptr, i64, i32)
declare void @WakeByAddressAll(ptr)

define internal void @block_while(ptr %address, i32 %value) {
  %compared = alloca i32
  store i32 %value, ptr %compared
  %woken = call i32 @WaitOnAddress(ptr %address, ptr %compared, i64 4, i32 -1)
  ret void
}

define internal void @wake(ptr %address, i32 %count) {
  call void @WakeByAddressAll(ptr %address)
  ret void
}

define internal void @reset_waiting() {
  ret void
}
"""),
}
WAIT_IMPORTS: dict[WaitKind, tuple[str, ...]] = {
    "futex": ("syscall",),
    "condvar": (
        *("pthread_mutex_init", "pthread_mutex_lock", "pthread_mutex_unlock"),
        *("pthread_cond_init", "pthread_cond_wait", "pthread_cond_broadcast"),
    ),
    "wait_on_address": ("WaitOnAddress", "WakeByAddressAll"),
}
FUTEX_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "loongarch64": 98, "ppc64le": 221, "s390x": 238}

# Instruction of a spinning round, and its declaration.
_PAUSE = ("call void @llvm.x86.sse2.pause()", "declare void @llvm.x86.sse2.pause()")
_BARRIER = ("call void @llvm.aarch64.isb(i32 15)", "declare void @llvm.aarch64.isb(i32)")  # Arm's yield does nothing
_NO_RELAX = ('fence syncscope("singlethread") seq_cst', "")
_RELAX = {"x86_64": _PAUSE, "amd64": _PAUSE, "aarch64": _BARRIER, "arm64": _BARRIER}


def yield_symbol(wait: WaitKind) -> str:
    """System function that yields the core."""
    return "SwitchToThread" if wait == "wait_on_address" else "sched_yield"


def pool_ir(wait: WaitKind, machine: str) -> str:
    """LLVM IR of the pool for a machine, named as by `platform.machine()`."""
    closed, waiting = 1 << 31, 1 << 30
    epoch_offset = 4 if sys.byteorder == "little" else 0  # bytes from the state word to its epoch half
    relax, relax_declaration = _RELAX.get(machine.lower(), _NO_RELAX)
    pool = _POOL_IR.substitute(
        closed=closed,
        waiting=waiting,
        active_mask=waiting - 1,
        low_mask=(1 << 32) - 1,
        epoch_mask=-(1 << 32),
        epoch_step=1 << 32,
        last_awaited=closed | waiting | 1,
        epoch_offset=epoch_offset,
        active_offset=4 - epoch_offset,
        relax=relax,
        relax_declaration=relax_declaration,
        yield_core=yield_symbol(wait),
    )
    return pool + _WAIT_IR[wait].substitute(futex=FUTEX_NUMBERS.get(machine, 0))
