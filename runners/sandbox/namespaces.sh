# sh -c THIS sh USER DISK PLACE… -- COMMAND…, as root of new mount, process and network namespaces.
# Builds a root of nothing but PLACE…, read-only, and a folder for writing; then becomes a user without rights.
set -e
user=$1 disk=$2
shift 2
root=/sys # any folder that each system has: what was there is not in the new root
mount -t tmpfs -o mode=755,size=1m,nosuid,nodev none "$root"
while [ "$1" != -- ]; do
    if [ -L "$1" ]; then
        ln -s "$(readlink "$1")" "$root$1"
    elif [ -d "$1" ]; then
        mkdir -p "$root$1"
        mount --rbind "$1" "$root$1"
        mount -o remount,bind,ro,nosuid "$root$1"
    else
        mkdir -p "$root$(dirname "$1")"
        : >"$root$1"
        mount --bind "$1" "$root$1"
        mount -o remount,bind,ro,nosuid "$root$1"
    fi
    shift
done
shift
mkdir "$root/proc" "$root/dev" "$root/scratch" "$root/old"
for device in null zero urandom; do
    : >"$root/dev/$device"
    mount --bind "/dev/$device" "$root/dev/$device"
done
mount -t tmpfs -o "mode=1777,size=$disk,nr_inodes=10000,nosuid,nodev" none "$root/scratch"
mount -t proc -o nosuid,nodev,noexec none "$root/proc"
cd "$root"
pivot_root . old
umount -l /old
mount -o remount,bind,ro,nosuid,nodev /
lock='echo 0 >/proc/sys/user/max_user_namespaces
exec setpriv --no-new-privs --bounding-set=-all --inh-caps=-all --ambient-caps=-all -- "$@"'
if [ -n "$user" ]; then
    exec setpriv --reuid "$user" --regid "$user" --clear-groups -- unshare --user --map-root-user sh -c "$lock" sh "$@"
fi
eval "$lock"
